"""Compares one tier and two tiers of exchanges between two simulated hosts of two ranks.

    python jobs/bench/hosts.py --mbit 1000     # as root on Linux, with iproute2

A host is a network namespace; a veth pair of limited rate is the wire between them. Ranks of one namespace use its
loopback. Both sides get the same tables, plan and batches, in the same processes, in turns. The result is the median of
the ratios within the rounds; the counters of the wire give the bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import arguments, machine, paired_ratio, require

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.executors import pooled as tiers
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

LOCAL, WORLD = 2, 4
TABLES, ROWS, DIM = 26, 20_000, 64
SPACES, ENDS, ADDRESSES = ("rayrec-a", "rayrec-b"), ("rayrec0", "rayrec1"), ("10.77.0.1", "10.77.0.2")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
CASES = [(1024, 26), (1024, 13), (256, 26), (64, 26), (16, 26)]  # examples of a rank, tables cut by rows on a host


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the wire in each direction")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--always", action="store_true", help="two tiers for small batches too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        tiers.MIN_SAVED_BYTES = 0 if args.always else tiers.MIN_SAVED_BYTES
        return run_rank(args.rank, args.rounds)
    require(shutil.which("ip") and os.geteuid() == 0, "needs root, and ip and tc (apt-get install iproute2)")
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        connect(args.mbit)
        print(f"{machine()}; 2 hosts of 2 ranks, {args.mbit} Mbit/s between them, 1 thread per rank", flush=True)
        for rank in range(WORLD):
            command = [sys.executable, *sys.argv, "--rank", str(rank)]
            quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # namespaces have no host names
            ranks.append(subprocess.Popen(["ip", "netns", "exec", SPACES[rank // LOCAL], *command], env=quiet))
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def connect(mbit: int) -> None:
    """Makes two network namespaces and a wire of limited rate between them."""
    for space in SPACES:
        run("ip", "netns", "add", space)
    run("ip", "link", "add", ENDS[0], "netns", SPACES[0], "type", "veth", "peer", "name", ENDS[1], "netns", SPACES[1])
    for space, end, address in zip(SPACES, ENDS, ADDRESSES, strict=True):
        run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", end)
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "link", "set", end, "up")
        limit = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
        run("tc", "-n", space, "qdisc", "add", "dev", end, "root", "tbf", *limit)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def run_rank(rank: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = ENDS[rank // LOCAL]
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29577", rank=rank, world_size=WORLD)
    if rank == 0:
        print(f"{'batch':>6} {'cut by rows':>12} {'one tier':>16} {'two tiers':>16} {'time ratio':>11}")
    for batch, cut_by_rows in CASES:
        sides = [stepper(batch, cut_by_rows, local, rank) for local in (1, LOCAL)]
        count = rounds * max(1, min(8, 256 // batch))
        timed = [timed_round(sides, ENDS[rank // LOCAL], number % 2) for number in range(count + 2)][2:]
        if rank == 0:
            show(batch, cut_by_rows, timed)
    comm.leave()


def show(batch: int, cut_by_rows: int, timed: list[list[tuple[float, float]]]) -> None:
    flat_s, by_host_s = zip(*((flat[0], by_host[0]) for flat, by_host in timed), strict=True)
    ratio = paired_ratio(by_host_s, flat_s)
    medians = [[statistics.median(figures) for figures in zip(*side, strict=True)] for side in zip(*timed, strict=True)]
    flat, by_host = (f"{seconds * 1e3:.1f} ms {sent / 1e6:.1f} MB" for seconds, sent in medians)
    print(f"{batch:>6} {f'{cut_by_rows} of {TABLES}':>12} {flat:>16} {by_host:>16} {ratio:>11.2f}", flush=True)


def stepper(batch: int, cut_by_rows: int, local: int, rank: int) -> Callable[[], None]:
    """A training step under a plan that cuts some tables by rows within a host and places the others on one rank."""
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(TABLES)
    ]
    plan = {}
    for number, table in enumerate(tables):
        first = number % 2 * LOCAL
        kind, ranks = (
            (ShardingType.TABLE_ROW_WISE, range(first, first + LOCAL))
            if number < cut_by_rows
            else (ShardingType.TABLE_WISE, [number % WORLD])
        )
        shards = CUTS[kind](table.name, ROWS, DIM, ranks)
        plan[table.name] = ParameterSharding(sharding_type=kind.value, compute_kernel="fused", shards=shards)
    assert dist.group.WORLD is not None
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(
        EmbeddingBagCollection(tables, device="meta"),
        plan,
        ShardingEnv.from_process_group(dist.group.WORLD, local),
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, ROWS, (TABLES * batch,), generator=generator)
    keys = [f"f{n}" for n in range(TABLES)]
    kjt = KeyedJaggedTensor(keys, values, lengths=torch.ones(TABLES * batch, dtype=torch.int64))
    grad = torch.randn(batch, TABLES * DIM, generator=generator) / 1000
    return lambda: sharded(kjt).wait().values().backward(grad)


def timed_round(sides: list[Callable[[], None]], end: str, first: int) -> list[tuple[float, float]]:
    """A step of each side, side `first` first."""
    figures = {number: timed_step(sides[number], end) for number in (first, 1 - first)}
    return [figures[0], figures[1]]


def timed_step(step: Callable[[], None], end: str) -> tuple[float, float]:
    """Seconds of one step of all ranks, and bytes that left this host."""
    sent = Path(f"/sys/class/net/{end}/statistics/tx_bytes")
    dist.barrier()
    bytes_before, start = int(sent.read_text()), time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start, int(sent.read_text()) - bytes_before


if __name__ == "__main__":
    main()
