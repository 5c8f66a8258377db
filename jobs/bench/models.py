"""Times models of histories, tasks and retrieval: full evaluation, search, an epoch of SASRec, steps of rankers.

    python jobs/bench/models.py [--sequences beauty.txt] [--threads 2] [--only evaluation,search,epoch]
    python jobs/bench/models.py --peers DIR --only steps,recbole [--users 3000]

Without a file, sequences are drawn with the lengths of Beauty (8.9 items per user on average). SASRec is compared with
the padded form in plain torch: every user padded to 50 positions, one negative per position drawn in Python, binary
cross-entropy. `--peers` (see jobs/experiments/peers.py) compares with other packages: `steps` of DIN and MMoE with
FuxiCTR's (forward, backward, Adam on all parameters; same sizes and ids), and an epoch with RecBole's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import arguments, machine, medians, paired_ratio, print_json, require
from harness import in_turns as run_in_turns
from torch import nn

from jobs.experiments.peers import use
from jobs.experiments.retrieval import Sequences, evaluate
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
)
from rayrec.distributed.kernel import EmbOptimType
from rayrec.inference.topk import Approximate, top_k
from rayrec.metrics.ranking import Jagged, target_ranks
from rayrec.models import DIN, Batch, mmoe, sasrec
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

DIM, LENGTH, BATCH = 64, 50, 128
CLOCK = time.perf_counter


def seconds(act: Callable[[], Any], times: int = 3) -> float:
    """The shortest of a few calls, by the clock, or in processor seconds with `--cpu`."""
    times_s = []
    for _ in range(times):
        begin = CLOCK()
        act()
        times_s.append(CLOCK() - begin)
    return min(times_s)


def drawn_sequences(users: int = 22_363, items: int = 12_101, seed: int = 0) -> Sequences:
    generator = np.random.default_rng(seed)
    lengths = 5 + generator.geometric(1 / 4.9, users) - 1
    return Sequences([generator.integers(0, items, length) for length in lengths.clip(max=200)])


def model_of(data: Sequences, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    table = EmbeddingConfig(num_embeddings=data.num_items, embedding_dim=DIM, name="item", feature_names=["item"])
    return sasrec([table], 0, history="item", tables_device="cpu", seed=0, max_length=LENGTH, **settings)


def evaluation(data: Sequences) -> dict[str, float]:
    """Full ranking of 22,000 users over 12,000 items without seen items."""
    generator = torch.Generator().manual_seed(0)
    queries, items = torch.randn(22_000, DIM, generator=generator), torch.randn(12_000, DIM, generator=generator)
    targets = torch.randint(12_000, (22_000,), generator=generator)
    seen = Jagged(torch.randint(12_000, (22_000 * 9,), generator=generator), torch.arange(0, 22_000 * 9 + 1, 9))
    ranks_s = seconds(lambda: target_ranks(queries, items, targets, seen))
    print(f"ranks of 22,000 users over 12,000 items: {ranks_s:.2f} s")
    model = model_of(data)
    sasrec_s = seconds(lambda: evaluate(model, data, 1), 2)
    print(f"evaluation of SASRec, {len(data.rows):,} users over {data.num_items:,} items: {sasrec_s:.2f} s")
    return {"ranks_s": ranks_s, "sasrec_s": sasrec_s}


def search() -> dict[str, float]:
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
    build_s = CLOCK() - begin
    recall, _ = index.tune(queries, top_k(queries, items, 100)[1], 0.98)
    ivf_s = seconds(lambda: index.search(queries, 100, None))
    print(
        f"ivf (2,000 clusters): built in {build_s:.1f} s, {index.effort(100)} lists probed, recall {recall:.4f}, "
        f"{ivf_s:.3f} s, 1 / {exact_s / ivf_s:.1f} of exact"
    )
    singles = []
    for query in queries[:200]:
        begin = CLOCK()
        index.search(query[None], 100, None)
        singles.append(CLOCK() - begin)
    print(f"one query: median {np.median(singles) * 1e3:.2f} ms, p99 {np.quantile(singles, 0.99) * 1e3:.2f} ms")
    return {"exact_s": exact_s, "ivf_s": ivf_s, "recall": recall, "query_ms": float(np.median(singles)) * 1e3}


class Padded(nn.Module):
    """SASRec in plain torch with rows padded to `LENGTH`; item 0 is padding."""

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


def epoch(data: Sequences) -> dict[str, float]:
    """An epoch of SASRec with binary cross-entropy and of the padded form, in turns, twice."""
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
    print(f"epoch of SASRec: {own_s:.1f} s, of the padded form {peer_s:.1f} s: {own_s / peer_s:.2f}")
    return {"own_s": own_s, "peer_s": peer_s}


def recbole(data: Sequences) -> dict[str, float]:
    """An epoch of SASRec and of RecBole's with equal sizes and dropout, leave one out.

    RecBole makes a row of each prefix of a history, padded to `LENGTH`. Compares its two losses, BPR with one negative
    and the full softmax, with ours.
    """
    from jobs.experiments.peers import recbole_epoch

    sizes = {"MAX_ITEM_LIST_LENGTH": LENGTH, "hidden_size": DIM, "inner_size": DIM, "n_layers": 2, "n_heads": 1}
    sizes |= {"hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.2, "train_batch_size": 2048}
    ratios: dict[str, float] = {}
    for own_loss, loss in (({"kind": "bpr", "negatives": 128}, "BPR"), ({"kind": "softmax"}, "CE")):
        model = model_of(data, loss=own_loss)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)

        def own_epoch(model: nn.Module = model, adam: torch.optim.Adam = adam) -> None:
            for rows in data.epoch(np.random.default_rng(0), BATCH):
                adam.zero_grad(set_to_none=True)
                model(rows)[0].backward()
                adam.step()

        negatives = {"distribution": "uniform", "sample_num": 1} if loss == "BPR" else None
        with tempfile.TemporaryDirectory() as folder:
            rows = (row.tolist() for row in data.rows)
            settings = {**sizes, "loss_type": loss, "train_neg_sample_args": negatives}
            peer_s = seconds(recbole_epoch(rows, Path(folder), settings), 1)
        own_s = seconds(own_epoch, 2)
        ratios[loss] = own_s / peer_s
        print(
            f"epoch of SASRec, {own_loss['kind']}: {own_s:.2f} s, RecBole's {loss} {peer_s:.1f} s: {own_s / peer_s:.3f}"
        )
    return ratios


def in_turns(own: Callable[[], None], peer: Callable[[], None], steps: int = 40) -> str:
    """Median milliseconds of both, and the median of the ratios; the steps alternate."""
    times = run_in_turns({"own": lambda: seconds(own, 1), "peer": lambda: seconds(peer, 1)}, steps, warmup=5)
    own_s, peer_s = medians(times).values()
    return f"{own_s * 1e3:.2f} ms, FuxiCTR's {peer_s * 1e3:.2f} ms: {paired_ratio(*times.values()):.2f}"


def stepping(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    dense = model.dense_parameters().values() if isinstance(model, DistributedModelParallel) else model.parameters()
    adam = torch.optim.Adam(list(dense), lr=1e-3)

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        loss().backward()
        adam.step()

    return step


def sharded(model: nn.Module) -> nn.Module:
    """The model as one worker trains it: the tables' Adam is part of the backward."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params = {"optimizer": EmbOptimType.ADAM, "learning_rate": 1e-3}
    sharders = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(params)]
    return DistributedModelParallel(model, device=torch.device("cpu"), sharders=sharders)


def rankers(rows: int = 2048, items: int = 12_000, dim: int = 32) -> dict[str, str]:
    """A step of DIN, and of MMoE over 30 features and 2 tasks, against FuxiCTR's."""
    from jobs.experiments.peers import FuxiDIN, FuxiExperts, feature_map

    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    label = torch.randint(2, (rows, 2), generator=generator).float()
    lengths = torch.from_numpy((random.geometric(1 / 11, rows) - 1).clip(max=50))
    item, seen = (torch.randint(items, (n,), generator=generator) for n in (rows, int(lengths.sum())))
    sparse = KeyedJaggedTensor(
        ["item", "seen"], torch.cat([item, seen]), lengths=torch.cat([torch.ones_like(lengths), lengths])
    )
    batch = Batch(torch.empty(rows, 0), sparse, label[:, 0])
    table = EmbeddingBagConfig(name="item", num_embeddings=items, embedding_dim=dim, feature_names=["item", "seen"])
    attention = [{"history": ["seen"], "target": ["item"]}]
    din = sharded(DIN([table], 0, [64, 32, 1], attention=attention, softmax=True))
    padded = torch.zeros(rows, int(lengths.max()), dtype=torch.int64)
    padded[torch.arange(padded.shape[1]) < lengths[:, None]] = seen + 1
    fuxi_din = FuxiDIN(items, dim, [64, 16], [64, 32])
    peer = stepping(fuxi_din, lambda: F.binary_cross_entropy(fuxi_din(item + 1, padded), label[:, 0]))
    results = {"DIN": in_turns(stepping(din, lambda: din(batch)[0]), peer)}
    print(f"step of DIN, {rows} rows: {results['DIN']}")
    names = [f"f{n}" for n in range(30)]
    ids = torch.randint(1000, (30, rows), generator=generator)
    sparse = KeyedJaggedTensor(names, ids.flatten(), lengths=torch.ones(30 * rows).long())
    task_batch = Batch(torch.empty(rows, 0), sparse, label)
    tables = [EmbeddingBagConfig(name=n, num_embeddings=1000, embedding_dim=8, feature_names=[n]) for n in names]
    own = sharded(mmoe(tables, 0, experts=4, expert=[64], tower=[32], task_weights=[1.0, 1.0]))
    fuxi = FuxiExperts(feature_map([], dict.fromkeys(names, 1000), ["a", "b"]), 8, 0, 4, [64], [32])
    inputs = {name: ids_B + 1 for name, ids_B in zip(names, ids, strict=True)}
    peer = stepping(fuxi, lambda: 2 * F.binary_cross_entropy(fuxi(inputs), label))
    results["MMoE"] = in_turns(stepping(own, lambda: own(task_batch)[0]), peer)
    print(f"step of MMoE, {rows} rows: {results['MMoE']}")
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="evaluation,search,epoch", help="also steps and recbole, with --peers")
    parser.add_argument("--cpu", action="store_true", help="measure processor seconds, for a machine that is not idle")
    parser.add_argument("--peers", type=Path, help="folder with FuxiCTR and RecBole")
    parser.add_argument("--users", type=int, help="users of an epoch; default: all")
    args = parser.parse_args()
    names = args.only.split(",")
    require(args.peers or not {"steps", "recbole"} & set(names), "steps and recbole need --peers DIR")
    print(machine(), flush=True)
    if args.cpu:
        global CLOCK
        CLOCK = time.process_time
    torch.set_num_threads(args.threads)
    data = drawn_sequences() if args.sequences is None else Sequences.read(args.sequences)
    use(args.peers)
    some_users = data if args.users is None else Sequences(data.rows[: args.users])
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "evaluation": lambda: evaluation(data),
        "search": search,
        "epoch": lambda: epoch(some_users),
        "steps": rankers,
        "recbole": lambda: recbole(some_users),
    }
    print_json(args, {name: measurements[name]() for name in names})


if __name__ == "__main__":
    main()
