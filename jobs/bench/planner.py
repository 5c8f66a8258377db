"""Measures the planner: its time, its distance from the lower bound, and its plans against those of TorchRec's planner.

    python jobs/bench/planner.py                                   # 100 x 16, 1000 x 128, 5000 x 512
    python jobs/bench/planner.py --shapes                          # Criteo 1TB on 8 GPUs, 10 TB on 512
    python -m venv peer && peer/bin/pip install torch fbgemm-gpu-cpu && \\
        peer/bin/pip install --no-deps torchrec==1.8.0 \\
            iopath pyre-extensions typing-inspect tensordict portalocker pyvers orjson
    python jobs/bench/planner.py --against torchrec --python peer/bin/python

To compare estimates with measured steps, run `jobs/experiments/simulate.py --check`.
"""

from __future__ import annotations

import collections
import json
import math
import resource
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
from harness import arguments, machine, print_json
from rich.console import Console
from rich.table import Table as RichTable

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner import ParameterConstraints, PlanResult, Topology, explain, plan_tables, write_html
from rayrec.distributed.planner.cost.estimate import evaluate
from rayrec.distributed.planner.report.text import columns, human_bytes
from rayrec.modules import EmbeddingBagConfig

SIZES = ((100, 2, 8, 0.5), (1000, 16, 8, 5.0), (5000, 64, 8, 60.0))  # tables, hosts, ranks a host, seconds allowed
CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
CRITEO_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
PEER = Path(__file__).with_name("planner_torchrec.py")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
BATCH = 512
PEER_TIMEOUT_S = 200


def draw(count: int, seed: int) -> tuple[list[EmbeddingBagConfig], dict[str, ParameterConstraints]]:
    """`count` tables: rows 10^2 to 10^7.5, dims 16 to 128, 1 to 30 ids a bag, each evenly in the exponent."""
    rng = np.random.default_rng(seed)
    tables, told = [], {}
    for number in range(count):
        name = f"t{number:04d}"
        tables.append(
            EmbeddingBagConfig(
                name=name,
                num_embeddings=int(10 ** rng.uniform(2, 7.5)),
                embedding_dim=int(4 * rng.integers(4, 33)),
                feature_names=[f"f{number}"],
            )
        )
        told[name] = ParameterConstraints(pooling_factors=[float(np.exp(rng.uniform(0, math.log(30))))])
    return tables, told


def planned(count: int, seed: int, topology: Topology) -> tuple[PlanResult, float]:
    tables, told = draw(count, seed)
    start = time.perf_counter()
    result = plan_tables(tables, topology, told, batch_size=BATCH, sharder=EmbeddingBagCollectionSharder(FUSED))
    return result, time.perf_counter() - start


def speed(seeds: int) -> bool:
    table = _table("tables x ranks", "seed", "seconds", "allowed", "worst / bound", "worst / mean lookup", "peak GB")
    good = True
    for count, hosts, local, allowed in SIZES:
        for seed in range(seeds):
            result, seconds = planned(count, seed, Topology.from_world(f"{hosts}x{local}", "h100"))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
            ratio, lookup = 1 + result.gap, result.estimate.lookup_ratio
            good &= seconds <= allowed and ratio <= 1.05 and lookup <= 1.10 and peak <= 1.0
            size = f"{count} x {hosts * local}"
            _row(table, size, seed, f"{seconds:.2f}", allowed, f"{ratio:.4f}", f"{lookup:.3f}", f"{peak:.2f}")
    _show("planner: drawn problems on H100", table)
    return good


def against_torchrec(python: str, problems: int) -> bool:
    """Plans of both, scored by rayrec's estimate and by TorchRec's own."""
    table = _table("problem", "rayrec s", "torchrec s", "rayrec ms", "torchrec ms", "ratio", "torchrec's score of both")
    good, ratios = True, []
    for seed in range(problems):
        rng = np.random.default_rng(1000 + seed)
        count, world = int(rng.integers(5, 101 if seed % 5 == 0 else 41)), int(rng.choice([2, 4, 8, 16]))
        hosts = max(1, world // 8)
        topology = Topology.from_world(f"{hosts}x{world // hosts}", "a100_40")
        result, seconds = planned(count, 1000 + seed, topology)
        answer = _ask_torchrec(python, count, 1000 + seed, topology, result.plan)
        size = f"{count} x {world}"
        if "error" in answer:
            _row(table, size, f"{seconds:.2f}", "-", f"{result.estimate.worst_s * 1e3:.3f}", answer["error"], "-", "-")
            continue
        theirs = evaluate(_with_replicas(answer["plan"], count, 1000 + seed, topology), result.tables, topology).worst_s
        ratio = result.estimate.worst_s / theirs
        ratios.append(ratio)
        good &= ratio <= 1 + 1e-9
        scores = " / ".join("-" if s is None else f"{s:.3f}" for s in (answer["ours_ms"], answer["theirs_ms"]))
        _row(
            table,
            size,
            f"{seconds:.2f}",
            f"{answer['seconds']:.1f}",
            f"{result.estimate.worst_s * 1e3:.3f}",
            f"{theirs * 1e3:.3f}",
            f"{ratio:.3f}",
            scores,
        )
    _show("planner: worst rank against TorchRec 1.8.0 (ratio below 1: rayrec's plan is better)", table)
    middle, worst = statistics.median(ratios), max(ratios)
    print(f"{len(ratios)} of {problems} solved by both; median ratio {middle:.3f}, worst {worst:.4f}")
    return good


def _with_replicas(data: dict, count: int, seed: int, topology: Topology) -> ShardingPlan:  # type: ignore[type-arg]
    """TorchRec's plan, which names no shards for data-parallel tables."""
    shapes = {t.name: [t.num_embeddings, t.embedding_dim] for t in draw(count, seed)[0]}
    for name, sharding in data["plan"][""].items():
        if sharding["shards"] is None:
            sharding["shards"] = [
                {"shard_offsets": [0, 0], "shard_sizes": shapes[name], "placement": f"rank:{r}/cuda:{r}"}
                for r in range(topology.world_size)
            ]
    return ShardingPlan.from_dict(data)


def _ask_torchrec(python: str, count: int, seed: int, topology: Topology, ours: ShardingPlan) -> dict:  # type: ignore[type-arg]
    tables, told = draw(count, seed)
    problem = {
        "tables": [
            {
                "name": t.name,
                "rows": t.num_embeddings,
                "dim": t.embedding_dim,
                "feature": t.feature_names[0],
                "pooling": next(iter(told[t.name].pooling_factors or [1.0])),
            }
            for t in tables
        ],
        "world_size": topology.world_size,
        "local_world_size": topology.local_world_size,
        "hbm_cap": topology.hosts[0].memory_bytes,
        "ddr_cap": topology.hosts[0].host_bytes,
        "hbm_mem_bw": topology.device.memory_bw,
        "intra_host_bw": topology.device.intra_host_bw,
        "inter_host_bw": topology.device.inter_host_bw,
        "batch_size": BATCH,
        "ours": ours.to_dict()["plan"][""],
    }
    try:
        done = subprocess.run(
            [python, str(PEER)], input=json.dumps(problem), capture_output=True, text=True, timeout=PEER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"over {PEER_TIMEOUT_S} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:60] if done.stderr.strip() else "failed"}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def shapes(html: str | None) -> bool:
    """Prints the plans of two models of real size, with what binds and what would help."""
    sharder = EmbeddingBagCollectionSharder(FUSED)
    for title, (tables, told), topology, batch in (
        ("MLPerf DLRM-DCNv2: 26 Criteo 1TB tables", criteo(), Topology.from_world("1x8", "h100"), 8192),
        ("synthetic, 10 TB of weights", ten_terabytes(), Topology.from_world("64x8", "h100"), BATCH),
    ):
        start = time.perf_counter()
        result = plan_tables(tables, topology, told, batch_size=batch, sharder=sharder)
        seconds = time.perf_counter() - start
        size = sum(t.weight_bytes for t in result.tables)
        print(f"== {title}: {size / 1e12:.2f} TB, {batch} examples a rank, planned in {seconds:.2f} s ==\n")
        print(explain(result), "\n")
        print(_sharding_text(result), "\n")
        if html:
            name = title.split(":")[0].split(",")[0].replace(" ", "_").lower()
            print("picture:", write_html(result, Path(html) / f"{name}.html", title))
    return True


def criteo() -> tuple[list[EmbeddingBagConfig], dict[str, ParameterConstraints]]:
    """The 26 tables, capped at 40 million rows, with MLPerf's multi-hot ids a bag."""
    tables = [
        EmbeddingBagConfig(name=f"cat_{n}", num_embeddings=rows, embedding_dim=128, feature_names=[f"cat_{n}"])
        for n, rows in enumerate(CRITEO_ROWS)
    ]
    return tables, {f"cat_{n}": ParameterConstraints(pooling_factors=[bag]) for n, bag in enumerate(CRITEO_BAGS)}


def ten_terabytes() -> tuple[list[EmbeddingBagConfig], dict[str, ParameterConstraints]]:
    """400 tables of width 64 or 128, rows spread over five decades and scaled to 10 TB of fp32 weights."""
    rng = np.random.default_rng(10)
    weight = 10 ** rng.uniform(0, 5, 400)
    dims = rng.choice([64, 128], 400)
    rows = np.maximum(100, weight * (10e12 / 4 / (weight * dims).sum())).astype(np.int64)
    tables = [
        EmbeddingBagConfig(name=f"t{n:03d}", num_embeddings=int(r), embedding_dim=int(d), feature_names=[f"f{n}"])
        for n, (r, d) in enumerate(zip(rows, dims, strict=True))
    ]
    return tables, {t.name: ParameterConstraints(pooling_factors=[float(20 ** rng.uniform())]) for t in tables}


def _sharding_text(result: PlanResult, most: int = 26) -> str:
    """The largest tables, one line each."""
    sharded = {t.key: result.plan.plan[t.path][t.name] for t in result.tables}
    largest = sorted(result.tables, key=lambda t: (-t.weight_bytes, t.key))[:most]
    rows = []
    for t in largest:
        p = sharded[t.key]
        ranks = str(p.ranks) if len(p.ranks) <= 8 else f"[{p.ranks[0]} .. {p.ranks[-1]}] ({len(p.ranks)})"
        rows.append(
            (t.label, f"{t.rows:,} x {t.dim}", human_bytes(t.weight_bytes), p.sharding_type, p.compute_kernel, ranks)
        )
    text = columns(("table", "rows x dim", "weights", "sharding type", "kernel", "ranks"), rows, frozenset({1, 2}))
    kinds = collections.Counter(p.sharding_type for p in sharded.values())
    return f"{text}\nall tables: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _table(*heads: str) -> RichTable:
    table = RichTable()
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _row(table: RichTable, *cells: object) -> None:
    table.add_row(*(str(cell) for cell in cells))


def _show(title: str, table: RichTable) -> None:
    console = Console(width=130)
    console.print(f"{title} · {machine()}")
    console.print(table)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="drawn problems of each size")
    parser.add_argument("--shapes", action="store_true", help="plan two models of real size")
    parser.add_argument("--html", metavar="FOLDER", help="with --shapes: draw the plans there")
    parser.add_argument("--against", choices=["torchrec"], help="compare with another planner")
    parser.add_argument("--python", default="python", help="an interpreter that has torchrec")
    parser.add_argument("--problems", type=int, default=20, help="how many to compare")
    args = parser.parse_args()
    if args.shapes:
        good = shapes(args.html)
    elif args.against:
        good = against_torchrec(args.python, args.problems)
    else:
        good = speed(args.seeds)
    print("all within limits" if good else "NOT within limits")
    print_json(args, {"within_limits": good})
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
