"""Times training steps of two checkouts of rayrec on the CPU, in turns.

    git worktree add --detach /tmp/earlier 5be9ecb
    python jobs/bench/versions.py /tmp/earlier [--rounds 15] [--json]

Each checkout has two gloo ranks that stay up; a round times a few steps of every case in the one and then in the other.
26 tables of 50,000 × 64 and two layers over them; forward, backward and update. The ratio is the median over rounds of
this checkout's time over the other's. Both must have the public names that this file uses.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

TABLES, ROWS, DIM, BATCHES = 26, 50_000, 64, 4
# Name, kind of plan, mean ids of a bag, batch of a rank, steps of a round.
CASES = (
    ("table-wise, batch 1024", "table", 1, 1024, 6),
    ("column-wise, batch 1024", "column", 1, 1024, 6),
    ("row-wise, batch 1024", "row", 1, 1024, 6),
    ("table-wise, batch 16", "table", 1, 16, 60),
    ("mixed, batch 1024", "mixed", 1, 1024, 6),
    ("row-wise, batch 512, 10 ids", "row", 10, 512, 6),
    ("mixed, batch 512, 10 ids", "mixed", 10, 512, 6),
)


class Model(nn.Module):
    """Two layers over pooled vectors."""

    def __init__(self, vectors: nn.Module) -> None:
        super().__init__()
        self.vectors = vectors
        self.over = nn.Sequential(nn.Linear(TABLES * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, features: Any) -> torch.Tensor:
        mean: torch.Tensor = self.over(self.vectors(features).values()).mean()
        return mean


def model_and_batches(kind: str, ids: int, batch: int) -> tuple[nn.Module, list[Any]]:
    from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, ShardingPlan
    from rayrec.distributed import ShardingType as Type
    from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
    from rayrec.sparse import KeyedJaggedTensor
    from tests.distributed.oracle import cut

    names = [f"f{n}" for n in range(TABLES)]
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
        for name in names
    ]
    kinds = {"table": [Type.TABLE_WISE], "row": [Type.ROW_WISE], "column": [Type.COLUMN_WISE]}
    chosen = kinds.get(kind) or [Type.TABLE_WISE, Type.ROW_WISE, Type.COLUMN_WISE]
    plan = {}
    for n, table in enumerate(tables):
        sharding = chosen[n % len(chosen)]
        plan[table.name] = cut(table, sharding, [n % 2] if sharding == Type.TABLE_WISE else [0, 1])
    model = DistributedModelParallel(
        Model(EmbeddingBagCollection(tables, device=torch.device("meta"))),
        ShardingEnv.from_process_group(dist.group.WORLD),
        torch.device("cpu"),
        ShardingPlan({"vectors": plan}),
        [EmbeddingBagCollectionSharder({"learning_rate": 0.1})],
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for _ in range(BATCHES):
        lengths = (
            torch.randint(1, 2 * ids, (TABLES * batch,), generator=draw) if ids > 1 else torch.ones(TABLES * batch)
        )
        lengths = lengths.to(torch.int64)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        batches.append(KeyedJaggedTensor(names, values, lengths=lengths))
    return model, batches


def serve(rank: int, store: str) -> None:
    """Times the cases whose numbers rank 0 reads from its standard input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    cases = [model_and_batches(kind, ids, batch) for _, kind, ids, batch, _ in CASES]
    for model, batches in cases:
        for batch in batches:
            model(batch).backward()
    if rank == 0:
        print("ready", flush=True)
    while True:
        number = torch.tensor(int(sys.stdin.readline() or -1) if rank == 0 else 0)
        dist.broadcast(number, 0)
        if number < 0:
            return
        (model, batches), steps = cases[int(number)], CASES[int(number)][-1]
        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            model(batches[step % BATCHES]).backward()
        dist.barrier()
        if rank == 0:
            print((time.perf_counter() - start) / steps, flush=True)


class Checkout:
    """Two ranks that run the code of a checkout."""

    def __init__(self, folder: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(folder)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__, "--serve"], cwd=folder, env=env, **pipes)
        while (line := self._read()) != "ready":
            if not line:
                raise SystemExit(f"{folder}: its ranks did not start; see above")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, case: int) -> float:
        """Time of a step."""
        self._write(case)
        return float(self._read())

    def _write(self, number: int) -> None:
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._write(-1)
        self._process.wait(60)


def main() -> None:
    from harness import arguments, machine, print_json

    parser = arguments(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(machine())
    sides = [Checkout(Path(__file__).resolve().parents[2]), Checkout(args.other.resolve())]
    times: list[list[tuple[float, float]]] = [[] for _ in CASES]
    for _ in range(args.rounds):
        for number, pairs in enumerate(times):
            pairs.append((sides[0].seconds(number), sides[1].seconds(number)))
    for side in sides:
        side.close()
    ratios = {}
    for (name, *_), pairs in zip(CASES, times, strict=True):
        ratios[name] = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"{name:30} {min(pairs)[0] * 1e3:8.2f} ms  {ratios[name]:.2f} of the other")
    print_json(args, ratios)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        with tempfile.TemporaryDirectory() as folder:
            peer = mp.get_context("spawn").Process(target=serve, args=(1, f"{folder}/store"))
            peer.start()
            serve(0, f"{folder}/store")
            peer.join()
    else:
        main()
