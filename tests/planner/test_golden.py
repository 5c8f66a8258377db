"""Plans of a few fixed problems, to the last shard, and what is said about them, as they were when last looked at.

Planning is pure, so whatever changes a plan, a predicted second or a byte shows here. After a change that is meant:
`python -m tests.planner.test_golden` writes `golden.json` and `golden.html` anew; their diff belongs into the review.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rayrec.distributed.planner import (
    NoPlanError,
    ParameterConstraints,
    PlanResult,
    Topology,
    explain,
    plan_tables,
    write_html,
)
from rayrec.modules import DataType, EmbeddingBagConfig
from tests.planner.problems import KINDS, SHARDER, drawn, table

GOLDEN, PICTURE = (Path(__file__).with_name(f"golden.{ending}") for ending in ("json", "html"))
SIZES = [2_000_000, 900_000, 300_000, 40_000, 5_000, 700, 90, 3]
MIXED = [table(f"t{n}", rows, 32 + 32 * (n % 3), [f"a{n}", f"b{n}"][: 1 + n % 2]) for n, rows in enumerate(SIZES)]
HALF = [
    EmbeddingBagConfig(
        name=f"h{n}", num_embeddings=rows, embedding_dim=64, feature_names=[f"h{n}"], data_type=DataType.FP16
    )
    for n, rows in enumerate(SIZES[:4])
]
LONG_BAGS = {t.name: ParameterConstraints(pooling_factors=[20.0] * len(t.feature_names)) for t in MIXED[:3]}
EVERY_KIND = {t.name: ParameterConstraints(sharding_types=[kind]) for t, kind in zip(MIXED, KINDS, strict=False)}
DENSE = {"t1": ParameterConstraints(compute_kernels=["dense"]), "t4": ParameterConstraints(device_group=[1, 2])}

PROBLEMS: dict[str, tuple[Any, ...]] = {
    "one rank": (MIXED, Topology(1, "cpu"), None),
    "four CPU ranks": (MIXED, Topology(4, "cpu"), None),
    "every kind on two hosts": (MIXED, Topology(4, "cpu", local_world_size=2), EVERY_KIND),
    "long bags on unlike hosts": (MIXED, Topology(5, "cpu", hosts=[2, 3]), LONG_BAGS),
    "little memory": (MIXED, Topology(4, "cpu", ddr_cap=320 << 20), None),
    "two hosts of GPUs": (MIXED, Topology(8, "cuda", local_world_size=4, gpu="h100"), LONG_BAGS),
    "tables behind a cache": (MIXED, Topology(2, "cuda", hbm_cap=[300 << 20], ddr_cap=[8 << 30]), None),
    "half precision": (HALF, Topology(4, "cuda", gpu="a100_80"), None),
    "dense and tied down": (MIXED, Topology(4, "cpu", local_world_size=2), DENSE),
}
HUGE = [table(f"t{n}", 20_000_000, 128) for n in range(10)]
REFUSED: dict[str, tuple[Any, ...]] = {
    "one table": (
        [table("big", 40_000_000, 128), table("small")],
        Topology(2, "cpu", ddr_cap=16 << 30),
        {"big": ParameterConstraints(sharding_types=["table_wise"])},
    ),
    "all tables": (HUGE, Topology(2, "cpu", ddr_cap=16 << 30), {}),
    "host memory too": ([table("big", 200_000_000, 128)], Topology(2, "cuda", hbm_cap=8 << 30, ddr_cap=8 << 30), {}),
    "no cut": (
        [table("t", 1000)],
        Topology(4, "cpu", hosts=[2, 2]),
        {"t": ParameterConstraints(sharding_types=["table_row_wise"], device_group=[1, 2])},
    ),
    "several hosts": (HUGE, Topology(8, "cpu", local_world_size=4, ddr_cap=8 << 30), {}),
}
DRAWN = (*range(10), 12, 16, 17, 18, 22, 25, 26, 28, 29, 35, *range(40, 48), 59, 71, 95, 107)


def result_of(name: str) -> PlanResult:
    tables, topology, told = PROBLEMS[name]
    return plan_tables(tables, topology, told, batch_size=512, dense_bytes=1 << 20, sharder=SHARDER)


def solved(name: str) -> dict[str, Any]:
    result = result_of(name)
    shardings = result.plan.plan[""].items()
    return {
        "plan": {
            table: [
                f"{sharding.sharding_type} {sharding.compute_kernel} {sharding.load_factor:g}",
                *(f"{s.rank}: {s.rows} {s.cols}" for s in sharding.shards),
            ]
            for table, sharding in shardings
        },
        "seconds": [f"{x:.6g}" for x in result.estimate.seconds_R],
        "device bytes": [f"{x:.6g}" for x in result.estimate.device_bytes_R],
        "host bytes": [f"{x:.6g}" for x in result.estimate.host_bytes_R],
        "bound": f"{result.bound_s:.6g}",
        "explanation": explain(result).splitlines(),
    }


@pytest.mark.parametrize("name", PROBLEMS)
def test_plans_are_as_they_were(name: str) -> None:
    assert solved(name) == json.loads(GOLDEN.read_text())[name], "if it is meant: python -m tests.planner.test_golden"


def in_brief(seed: int) -> dict[str, Any] | str:
    """The plan of a drawn problem, a line a table, or the reasons for which there is none."""
    listed, topology, told = drawn(seed)
    try:
        result = plan_tables(listed, topology, told, batch_size=256, sharder=SHARDER)
    except NoPlanError as error:
        return str(error)
    plan = {
        name: f"{one.sharding_type} {one.compute_kernel} {one.load_factor:g} on {[shard.rank for shard in one.shards]}"
        for name, one in result.plan.plan[""].items()
    }
    return {**plan, "worst": f"{result.estimate.worst_s:.6g}", "bound": f"{result.bound_s:.6g}"}


@pytest.mark.parametrize("seed", DRAWN)
def test_plans_with_little_memory_are_as_they_were(seed: int) -> None:
    expected = json.loads(GOLDEN.read_text())[f"drawn {seed}"]
    assert in_brief(seed) == expected, "if it is meant: python -m tests.planner.test_golden"


def refusal(name: str) -> str:
    tables, topology, told = REFUSED[name]
    with pytest.raises(NoPlanError) as caught:
        plan_tables(tables, topology, told, sharder=SHARDER)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_as_they_were(name: str) -> None:
    expected = json.loads(GOLDEN.read_text())[f"refused: {name}"]
    assert refusal(name) == expected, "if it is meant: python -m tests.planner.test_golden"


def picture(folder: Path) -> str:
    """One tag a line."""
    result = result_of("every kind on two hosts")
    page = write_html(result, folder / "plan.html", title="a plan", explanation="why").read_text(encoding="utf-8")
    return page.replace("><", ">\n<")


def test_the_picture_is_as_it_was(tmp_path: Path) -> None:
    assert picture(tmp_path) == PICTURE.read_text(), "if it is meant: python -m tests.planner.test_golden"


if __name__ == "__main__":
    found = {name: solved(name) for name in PROBLEMS} | {f"drawn {seed}": in_brief(seed) for seed in DRAWN}
    found |= {f"refused: {name}": refusal(name) for name in REFUSED}
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with TemporaryDirectory() as folder:
        PICTURE.write_text(picture(Path(folder)), encoding="utf-8")
