"""What one of four ranks on two hosts does for `test_exchange.py`: steps under every sharding type, and the planner's.

Run as a program with RANK in the environment; rank 0 writes what was found to the file that is named.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, EmbOptimType, ShardingEnv, ShardingType, comm
from rayrec.distributed.planner import ParameterConstraints, PlanResult, Topology, plan_tables
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

WORLD, LOCAL = 4, 2
TABLES, ROWS, DIM, BATCH = 8, 20_000, 64, 512
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
KINDS = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL] + [ShardingType.DATA_PARALLEL]
ROUNDS, WARM, STEPS = 4, 1, 3

Step = Callable[[], None]


def bytes_between_hosts(result: PlanResult) -> float:
    """What the planner expects a step to send across hosts: its seconds are bytes divided by the link's bandwidth."""
    terms = [Cost._fields.index(name) for name in ("input_inter", "output_inter", "gradient_inter")]
    return float(result.estimate.cost_RT[:, terms].sum() * result.topology.device.inter_host_bw)


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(TABLES)
    ]


def planned(topology: Topology, kind: ShardingType | None = None) -> PlanResult:
    """The planner's answer, of its own choice or all of one sharding type."""
    only = None if kind is None else ParameterConstraints(sharding_types=[kind.value], min_partition=32)
    constraints = None if only is None else {f"t{n}": only for n in range(TABLES)}
    sharder = EmbeddingBagCollectionSharder(FUSED)
    return plan_tables(configs(), topology, constraints, batch_size=BATCH, sharder=sharder)


def stepper(result: PlanResult, rank: int) -> Step:
    assert dist.group.WORLD is not None
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(
        EmbeddingBagCollection(configs(), device="meta"),
        result.plan.plan[""],
        ShardingEnv.from_process_group(dist.group.WORLD, LOCAL),
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, ROWS, (TABLES * BATCH,), generator=generator)
    lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
    kjt = KeyedJaggedTensor([f"f{n}" for n in range(TABLES)], values, lengths=lengths)
    grad = torch.randn(BATCH, TABLES * DIM, generator=generator) / 1000
    return lambda: sharded(kjt).wait().values().backward(grad)


def measured(step: Step) -> dict[str, float]:
    """Seconds of the median step, and bytes that both hosts send in a step."""
    for _ in range(WARM):
        step()
    seconds = []
    dist.barrier()
    before = int(SENT.read_text())
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    sent: list[Any] = [None] * WORLD
    dist.all_gather_object(sent, (int(SENT.read_text()) - before) / STEPS)
    return {"seconds": statistics.median(seconds), "bytes": sum(sent[::LOCAL])}


def predicted(result: PlanResult) -> dict[str, float]:
    return {
        "predicted_bytes": bytes_between_hosts(result),
        "predicted_s": result.estimate.worst_s,
    }


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://h0:29500", rank=rank, world_size=WORLD)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))
    import calibrate  # type: ignore[import-not-found]

    assert dist.group.WORLD is not None
    speeds = calibrate.measure(dist.group.WORLD, torch.device("cpu"), LOCAL)
    if rank == 0:
        calibrate.write(out.with_suffix(".calibration"), torch.device("cpu"), WORLD, speeds)
    dist.barrier()
    topology = Topology.from_calibration(out.with_suffix(".calibration"), WORLD, local_world_size=LOCAL)
    results = {kind.value: planned(topology, kind) for kind in KINDS} | {"planner": planned(topology)}
    chosen = [sharding.sharding_type for sharding in results["planner"].plan.plan[""].values()]
    steps = {name: stepper(result, rank) for name, result in results.items()}
    # In turns, so that what disturbs a round disturbs all of it.
    rounds = [{name: measured(step) for name, step in steps.items()} for _ in range(ROUNDS)]
    found = {
        name: {
            "seconds": [one[name]["seconds"] for one in rounds],
            "bytes": statistics.median(one[name]["bytes"] for one in rounds),
            **predicted(result),
        }
        for name, result in results.items()
    }
    if rank == 0:
        out.write_text(json.dumps({"found": found, "chosen": chosen, "speeds": speeds}, indent=1))
    comm.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
