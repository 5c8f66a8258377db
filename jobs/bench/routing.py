"""Times how the ids of a batch are checked and split by the ranks that hold their rows, on the CPU.

    python jobs/bench/routing.py [--threads 1 2] [--ids power-law] [--json]

One process splits a batch of 26 features for 8 ranks, with one row per plan, bag size and number of threads. In the
same run and in turns it times the host's work when a GPU splits the ids (check and count), fbgemm's operator
`block_bucketize_sparse_features`, and a plain copy of the ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from embedding import draw_ids
from harness import arguments, in_turns, machine, medians, milliseconds, print_json

from rayrec.distributed.comm.host_memory import keep_freed_memory
from rayrec.distributed.ids.device_split import DeviceSplit
from rayrec.distributed.ids.input_dist import IdCheck
from rayrec.distributed.ids.routes import PlannedTable, Routes, make_routes
from rayrec.distributed.ids.sender import IdSender
from rayrec.distributed.kernel import OptimizerSpec
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

FEATURES, RANKS, ROWS, DIM = 26, 8, 1_000_000, 64
EXAMPLES = {1: 8192, 20: 8192, 200: 820}  # by mean ids per bag
GOALS = {1: 15.0, 20: 8.0, 200: 8.0}  # ns an id on one thread, row-wise
COUNT_GOAL = 4e6 / 1.75e6  # ns an id where a GPU splits: 4 ms for the 1.75 M ids a rank of MLPerf's DLRM-DCNv2


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(FEATURES)
    ]


def routes_of(kind: ShardingType) -> Routes:
    plan = {}
    for number, table in enumerate(tables()):
        ranks = [number % RANKS] if kind is ShardingType.TABLE_WISE else list(range(RANKS))
        plan[table.name] = ParameterSharding(kind.value, "fused", shards=CUTS[kind](table.name, ROWS, DIM, ranks))
    spec = OptimizerSpec.from_fused_params(None)
    planned = [PlannedTable(table, plan[table.name], spec) for table in tables()]
    return make_routes(planned, RANKS, lambda table: table.config.data_type)


def batch_of(bag: int, ids: str, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(0)
    bags = FEATURES * EXAMPLES[bag]
    lengths = torch.ones(bags, dtype=torch.int32)
    if bag > 1:
        lengths = torch.randint(0, 2 * bag + 1, (bags,), generator=generator, dtype=torch.int32)
    values = draw_ids(ROWS, int(lengths.sum()), ids, generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor([f"f{n}" for n in range(FEATURES)], values, weights, lengths=lengths)


def route(sender: IdSender, check: IdCheck, batch: KeyedJaggedTensor) -> None:
    check.check(batch)
    sender.pack(batch, ())


def measure(kind: ShardingType, bag: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(threads)
    routes, batch = routes_of(kind), batch_of(bag, args.ids, args.weighted)
    sender = IdSender(routes, args.weighted, traced=False, num_counts=0)
    checked = IdCheck(tables(), args.weighted, frozenset(routes.features))
    on_device = DeviceSplit(routes, args.weighted, torch.device("cpu"))

    def count() -> None:
        checked.check(batch)
        on_device.count(batch)

    copied, blocks = torch.empty_like(batch.values()), torch.full((FEATURES,), -(-ROWS // RANKS))

    def fbgemm() -> None:
        torch.ops.fbgemm.block_bucketize_sparse_features(
            batch.lengths(), batch.values(), False, False, blocks, RANKS, batch.weights_or_none()
        )

    acts: dict[str, Callable[[], object]] = {
        "rayrec_ns": lambda: route(sender, checked, batch),
        "count_ns": count,
        "fbgemm_ns": fbgemm,
        "copy_ns": lambda: copied.copy_(batch.values()),
    }
    times = in_turns({name: partial(milliseconds, act) for name, act in acts.items()}, args.rounds, warmup=1)
    num_ids = batch.values().numel()
    ns = {name: ms / num_ids * 1e6 for name, ms in medians(times).items()}
    row: dict[str, Any] = {"plan": kind.value, "ids_per_bag": bag, "ids": num_ids, "threads": threads}
    row |= ns
    row["ids_per_s"] = 1e9 / ns["rayrec_ns"]
    row["goal_ns"] = GOALS[bag] / threads if kind is ShardingType.ROW_WISE else None
    return row


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of threads (default 1)")
    cli.add_argument("--ids", choices=["uniform", "power-law"], default="uniform", help="distribution of the ids")
    cli.add_argument("--weighted", action="store_true", help="ids carry weights")
    cli.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    args = cli.parse_args()
    keep_freed_memory()  # as sharded collections do on a CPU
    print(
        f"{machine()}; {FEATURES} features, {RANKS} ranks, {args.ids} ids{', weighted' * args.weighted}; "
        f"ns per id, median of {args.rounds} rounds"
    )
    rows = []
    for kind in (ShardingType.ROW_WISE, ShardingType.TABLE_WISE):
        for bag in EXAMPLES:
            for threads in args.threads:
                row = measure(kind, bag, threads, args)
                goal = f" (goal ≤ {row['goal_ns']:.1f})" if row["goal_ns"] else ""
                print(
                    f"{row['plan']:10s} {bag:3d} ids per bag, {threads} threads: rayrec {row['rayrec_ns']:5.1f}{goal}  "
                    f"for a GPU {row['count_ns']:4.1f} (goal ≤ {COUNT_GOAL:.1f})  "
                    f"fbgemm {row['fbgemm_ns']:5.1f}  copy {row['copy_ns']:4.1f}",
                    flush=True,
                )
                rows.append(row)
    print_json(args, {"rows": rows})


if __name__ == "__main__":
    main()
