"""Times a training step of sequence lookups with each distinct id sent once (`sharding.dedup`), and without, in turns.

    python jobs/bench/dedup.py [--rounds 15] [--json]

Two gloo ranks of one thread, four row-wise tables × 64, 256 histories of 1 to 99 ids a rank and table. Fewer rows make
more repetitions; ids follow Zipf's law with exponent 0.75. `auto` decides for each batch.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from embedding import FUSED, RW, Case, names, on_ranks, sequence_stepper, timed
from harness import arguments, in_turns, machine, medians, paired_ratio

from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

ROWS = (100, 1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000)
EXPONENT = 0.75
HISTORIES, LONGEST = 256, 99


def batches(case: Case, rank: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(rank)
    keys = [feature for _, feature, _ in names(case)]
    cumulated = torch.arange(1, case.rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(case.rows))
    made = []
    for _ in range(4):
        lengths = torch.randint(1, LONGEST + 1, (len(keys) * case.batch,), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64) * cumulated[-1]
        values = order[torch.searchsorted(cumulated, drawn).clamp_(max=case.rows - 1)]
        made.append(KeyedJaggedTensor(keys, values, lengths=lengths))
    return made


def sharded(case: Case, dedup: Any) -> Any:
    tables, plan = [], {}
    for table, feature, kind in names(case):
        config = EmbeddingConfig(name=table, num_embeddings=case.rows, embedding_dim=case.dim, feature_names=[feature])
        shards = CUTS[ShardingType(kind)](table, case.rows, case.dim, list(range(dist.get_world_size())))
        tables.append(config)
        plan[table] = ParameterSharding(sharding_type=kind, compute_kernel="fused", shards=shards)
    assert dist.group.WORLD is not None
    env, cpu = ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    return EmbeddingCollectionSharder(FUSED, dedup=dedup).shard(
        EmbeddingCollection(tables, device="meta"), plan, env, cpu
    )


def distinct_share(kjts: list[KeyedJaggedTensor]) -> float:
    """Distinct ids of a feature in a batch, over its ids."""
    of_features = [ids for kjt in kjts for ids in kjt.values().split(kjt.length_per_key())]
    return sum(ids.unique().numel() for ids in of_features) / sum(ids.numel() for ids in of_features)


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    for rows in args.rows:
        case = Case(f"{rows:,} rows", HISTORIES, LONGEST, (RW,) * 4, rows=rows, pooled=False)
        kjts = batches(case, rank)
        sides = {
            name: sequence_stepper(sharded(case, dedup), kjts, case)
            for name, dedup in (("off", False), ("on", True), ("auto", "auto"))
        }
        for step in sides.values():
            timed(step, 10)
        times = in_turns({name: partial(timed, step, 5) for name, step in sides.items()}, args.rounds)
        if rank == 0:
            median = medians(times)
            row = {"rows": rows, "distinct": distinct_share(kjts), **{f"{name}_ms": ms for name, ms in median.items()}}
            row |= {"on": paired_ratio(times["on"], times["off"])}
            better = "on" if row["on"] < 1 else "off"
            row["auto"] = paired_ratio(times["auto"], times[better])
            print(
                f"{case.name:>16s}: {row['distinct']:5.1%} distinct, off {median['off']:6.2f} ms, on / off "
                f"{row['on']:.2f}, auto / the better one {row['auto']:.2f} (goal ≤ 1.03)",
                flush=True,
            )
            results.append(row)


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    cli.add_argument("--rows", type=int, nargs="*", default=ROWS, help="rows of a table, of each case")
    args = cli.parse_args()
    print(f"{machine()}, 2 gloo ranks of 1 thread; median of {args.rounds} rounds")
    on_ranks(work, args)


if __name__ == "__main__":
    main()
