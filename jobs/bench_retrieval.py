"""Speed of retrieval on this machine: full evaluation, exact and approximate search, an epoch of SASRec.

    python jobs/bench_retrieval.py [--sequences beauty.txt] [--threads 2] [--only evaluation,search,epoch]

Without a file, sequences are drawn with Beauty's lengths (8.9 items a user on average). SASRec's peer is the padded
form in plain torch: every user padded to 50 positions, one negative a position drawn in Python, binary cross-entropy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from jobs.experiment_retrieval import Sequences, evaluate
from rayrec.inference.approximate import Approximate
from rayrec.inference.topk import top_k
from rayrec.metrics.ranking import Jagged, target_ranks
from rayrec.models import sasrec
from rayrec.modules import EmbeddingConfig

DIM, LENGTH, BATCH = 64, 50, 128
CLOCK = time.perf_counter


def seconds(act: Callable[[], Any], times: int = 3) -> float:
    """The least of a few visits, by the clock, or in seconds of CPU with `--cpu`."""
    took = []
    for _ in range(times):
        begin = CLOCK()
        act()
        took.append(CLOCK() - begin)
    return min(took)


def drawn_sequences(users: int = 22_363, items: int = 12_101, seed: int = 0) -> Sequences:
    generator = np.random.default_rng(seed)
    lengths = 5 + generator.geometric(1 / 4.9, users) - 1
    return Sequences([generator.integers(0, items, length) for length in lengths.clip(max=200)])


def model_of(data: Sequences, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    table = EmbeddingConfig(num_embeddings=data.num_items, embedding_dim=DIM, name="item", feature_names=["item"])
    return sasrec([table], 0, history="item", tables_device="cpu", seed=0, max_length=LENGTH, **settings)


def evaluation(data: Sequences) -> None:
    """Full ranking of 22,000 users over 12,000 items, seen items left out."""
    generator = torch.Generator().manual_seed(0)
    queries, items = torch.randn(22_000, DIM, generator=generator), torch.randn(12_000, DIM, generator=generator)
    targets = torch.randint(12_000, (22_000,), generator=generator)
    seen = Jagged(torch.randint(12_000, (22_000 * 9,), generator=generator), torch.arange(0, 22_000 * 9 + 1, 9))
    print(
        f"ranks of 22,000 users over 12,000 items: {seconds(lambda: target_ranks(queries, items, targets, seen)):.2f} s"
    )
    model = model_of(data)
    took = seconds(lambda: evaluate(model, data, 1), 2)
    print(f"evaluation of SASRec, {len(data.rows):,} users over {data.num_items:,} items, queries made: {took:.2f} s")


def search() -> None:
    """Exact top-100 of 1,000 queries over a million vectors, and IVF tuned to a recall of 0.98."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(2000, DIM, generator=generator)
    kinds = torch.randint(2000, (1_000_000,), generator=generator)
    items = F.normalize(centres[kinds] + 0.6 * torch.randn(1_000_000, DIM, generator=generator))
    queries = F.normalize(centres[:1000] + 0.6 * torch.randn(1000, DIM, generator=generator))
    exact_s = seconds(lambda: top_k(queries, items, 100), 2)
    print(f"exact top-100 of 1,000 queries over 1,000,000 × {DIM}: {exact_s:.2f} s")
    begin = CLOCK()
    index = Approximate.build("ivf", items)
    built = CLOCK() - begin
    recall, _ = index.tune(queries, top_k(queries, items, 100)[1], 0.98)
    took = seconds(lambda: index.search(queries, 100, None))
    print(
        f"ivf (2,000 clusters): built in {built:.1f} s, {index.effort} lists probed, recall {recall:.4f}, "
        f"{took:.3f} s, 1 / {exact_s / took:.1f} of exact"
    )
    singles = []
    for query in queries[:200]:
        begin = CLOCK()
        index.search(query[None], 100, None)
        singles.append(CLOCK() - begin)
    print(f"one query: median {np.median(singles) * 1e3:.2f} ms, p99 {np.quantile(singles, 0.99) * 1e3:.2f} ms")


class Padded(nn.Module):
    """SASRec in plain torch, every row padded to `LENGTH`; item 0 is padding."""

    def __init__(self, items: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.dropout = nn.Dropout(dropout)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(DIM, 1, dropout, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, eps=1e-8) for _ in range(5))
        self.inner = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, rows: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.items(rows) * DIM**0.5 + self.positions.weight)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in range(2):
            normed = self.norms[2 * block](x)
            x = x + self.attentions[block](normed, normed, normed, attn_mask=later, need_weights=False)[0]
            inner = self.dropout(F.relu(self.inner[block](self.norms[2 * block + 1](x))))
            x = x + self.dropout(self.outer[block](inner))
        x = self.norms[4](x)
        real = positives > 0
        above, below = ((x * self.items(ids)).sum(2)[real] for ids in (positives, negatives))
        return F.softplus(-above).mean() + F.softplus(below).mean()


def padded_batch(data: Sequences, users: np.ndarray, generator: np.random.Generator) -> tuple[torch.Tensor, ...]:
    rows, positives, negatives = (np.zeros((len(users), LENGTH), dtype=np.int64) for _ in range(3))
    for place, user in enumerate(users):
        items = data.rows[user][:-2][-(LENGTH + 1) :] + 1
        count, own = len(items) - 1, set(items.tolist())
        for column in range(LENGTH - count, LENGTH):
            negative = int(generator.integers(1, data.num_items + 1))
            while negative in own:
                negative = int(generator.integers(1, data.num_items + 1))
            negatives[place, column] = negative
        if count > 0:
            rows[place, -count:], positives[place, -count:] = items[:-1], items[1:]
    return tuple(torch.from_numpy(part) for part in (rows, positives, negatives))


def epoch(data: Sequences) -> None:
    """Of SASRec with binary cross-entropy, and of its padded peer; in turns, twice."""
    model = model_of(data, loss={"kind": "bce", "negatives": 128})
    peer = Padded(data.num_items)
    own_adam, peer_adam = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (model, peer))

    def own_epoch() -> None:
        for rows in data.epoch(np.random.default_rng(0), BATCH):
            own_adam.zero_grad(set_to_none=True)
            model(rows)[0].backward()
            own_adam.step()

    def peer_epoch() -> None:
        generator = np.random.default_rng(0)
        order = generator.permutation(len(data.rows))
        for start in range(0, len(order), BATCH):
            peer_adam.zero_grad(set_to_none=True)
            peer(*padded_batch(data, order[start : start + BATCH], generator)).backward()
            peer_adam.step()

    peer_s, own_s = seconds(peer_epoch, 1), seconds(own_epoch, 1)
    peer_s, own_s = min(peer_s, seconds(peer_epoch, 1)), min(own_s, seconds(own_epoch, 1))
    print(f"epoch of SASRec: {own_s:.1f} s, of the padded peer {peer_s:.1f} s: {own_s / peer_s:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="evaluation,search,epoch")
    parser.add_argument("--cpu", action="store_true", help="seconds of CPU, where other work shares the machine")
    parser.add_argument("--users", type=int, help="of the epoch; default: all")
    args = parser.parse_args()
    if args.cpu:
        global CLOCK
        CLOCK = time.process_time
    torch.set_num_threads(args.threads)
    data = drawn_sequences() if args.sequences is None else Sequences.read(args.sequences)
    for name in args.only.split(","):
        if name == "search":
            search()
        elif name == "evaluation":
            evaluation(data)
        else:
            epoch(data if args.users is None else Sequences(data.rows[: args.users]))


if __name__ == "__main__":
    main()
