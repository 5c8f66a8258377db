"""Planning for a cluster that you need not have: what fits, what limits it, and what changes between two plans."""

import tempfile
from pathlib import Path

from rayrec.distributed.planner import (
    NoPlanError,
    ParameterConstraints,
    PlanResult,
    Topology,
    check_plan,
    diff,
    explain,
    plan_tables,
    write_html,
)
from rayrec.modules import EmbeddingBagConfig

tables = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=64, feature_names=[name])
    for name, rows in (("user", 20_000_000), ("item", 2_000_000), ("country", 200))
]
topology = Topology(world_size=16, local_world_size=8, gpu="a100_80")
result: PlanResult = plan_tables(tables, topology, batch_size=2048)
print(explain(result, with_advice=False))

rows = {"item": ParameterConstraints(sharding_types=["row_wise"])}
other = plan_tables(tables, topology, rows, batch_size=2048)
print(diff(result.plan, other.plan))
estimate = check_plan(other.plan, result.tables, topology)  # raises where a rank's memory is too small
assert estimate.seconds_R.max() >= result.bound_s

with tempfile.TemporaryDirectory() as folder:
    assert write_html(result, Path(folder) / "plan.html").stat().st_size > 1000
try:
    plan_tables([EmbeddingBagConfig(10**10, 512, "huge", feature_names=["huge"])], Topology(2, gpu="a100_80"))
except NoPlanError as error:
    print(error)
