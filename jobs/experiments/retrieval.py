"""Quality of the retrieval models on data that you have, by full ranking; one process, no Ray.

    python jobs/experiments/retrieval.py beauty beauty.txt --model sasrec
    python jobs/experiments/retrieval.py movielens data/movielens/parquet

`beauty` takes a file with a user a line: the user, then items in order of time (S3-Rec's `Beauty.txt`). Leave one out:
the last item is the test, the last but one validation; training sees neither. The epoch is chosen by NDCG@10 of
validation.
`movielens` trains the two towers of data/movielens/two_tower.yaml, with q of in-batch negatives counted or estimated.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec.metrics.ranking import Jagged, RankingMetrics, popularity_ranks, target_ranks
from rayrec.models import Batch, hstu, sasrec
from rayrec.models.next_item import NextItem
from rayrec.modules import EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import Trainer, load_config

MAKERS: dict[str, Callable[..., NextItem]] = {"sasrec": sasrec, "hstu": hstu}
# Chosen by validation.
SETTINGS: dict[str, dict[str, Any]] = {
    "sasrec": {"normalize": True, "dropout": 0.5, "loss": {"temperature": 0.05, "negatives": 512}},
    "hstu": {"normalize": True, "dropout": 0.5, "loss": {"temperature": 0.05, "negatives": 512}},
}


class Sequences:
    """Users' items in order of time, and the three parts of leave-one-out."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = [row for row in rows if len(row) >= 3]
        self.num_items = 1 + max(int(row.max()) for row in self.rows)

    @classmethod
    def read(cls, path: Path) -> Sequences:
        lines = path.read_text(encoding="utf-8").splitlines()
        return cls([np.array(line.split()[1:], dtype=np.int64) - 1 for line in lines])

    def batch(self, users: np.ndarray, left_out: int) -> Batch:
        """Of the users all items but the last ones."""
        rows = [self.rows[user][: len(self.rows[user]) - left_out] for user in users]
        lengths = torch.tensor([len(row) for row in rows])
        kjt = KeyedJaggedTensor(["item"], torch.from_numpy(np.concatenate(rows)), lengths=lengths)
        return Batch(torch.empty(len(rows), 0), kjt, torch.ones(len(rows)))

    def seen(self, users: np.ndarray, left_out: int) -> Jagged:
        """The items of `batch`."""
        items = self.batch(users, left_out).sparse["item"]
        return Jagged(items.values(), items.offsets())

    def targets(self, users: np.ndarray, left_out: int) -> torch.Tensor:
        """The item after what `batch` gives."""
        return torch.tensor([self.rows[user][-left_out] for user in users])

    def epoch(self, generator: np.random.Generator, size: int) -> Iterator[Batch]:
        order = generator.permutation(len(self.rows))
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size], 2)

    def counts(self) -> torch.Tensor:
        """Of each item in training."""
        return torch.bincount(self.seen(np.arange(len(self.rows)), 2).ids, minlength=self.num_items)


@torch.no_grad()
def evaluate(model: NextItem, data: Sequences, left_out: int, size: int = 2048) -> dict[str, float]:
    """Full ranking, seen items left out. `left_out` 2: validation, 1: test."""
    model.eval()
    items_ID = model.items(torch.arange(data.num_items))
    ranks = []
    users = np.arange(len(data.rows))
    for start in range(0, len(users), size):
        part = users[start : start + size]
        queries = model.query(data.batch(part, left_out))
        ranks.append(target_ranks(queries, items_ID, data.targets(part, left_out), data.seen(part, left_out)))
    model.train()
    return RankingMetrics.of(torch.cat(ranks), (5, 10, 50)).metrics()


def popularity(data: Sequences) -> dict[str, float]:
    """The row that a model must be above."""
    users = np.arange(len(data.rows))
    ranks = popularity_ranks(data.counts(), data.targets(users, 1), data.seen(users, 1))
    return RankingMetrics.of(ranks, (5, 10, 50)).metrics()


def train(data: Sequences, args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains one model; its figures at the best epoch of validation."""
    torch.manual_seed(args.seed)
    table = EmbeddingConfig(
        num_embeddings=data.num_items,
        embedding_dim=args.dim,
        name="item",
        feature_names=["item"],
        init_fn=lambda rows: rows.normal_(std=0.02),
    )
    model = MAKERS[args.model]([table], 0, history="item", tables_device="cpu", seed=args.seed, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    generator = np.random.default_rng(args.seed)
    best: dict[str, Any] = {"validation": {"ndcg@10/unseen": -1.0}, "epoch": 0}
    state, seconds = None, 0.0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses = []
        for rows in data.epoch(generator, args.batch):
            optimizer.zero_grad(set_to_none=True)
            loss, _ = model(rows)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds += time.perf_counter() - start
        if epoch % args.eval_every:
            continue
        figures = evaluate(model, data, 2)
        print(
            json.dumps(
                {
                    "epoch": epoch,
                    "s": round(seconds, 1),
                    "loss": float(torch.stack(losses).mean()),
                    "hr10": round(figures["hr@10/unseen"], 4),
                    "ndcg10": round(figures["ndcg@10/unseen"], 4),
                }
            ),
            flush=True,
        )
        if figures["ndcg@10/unseen"] > best["validation"]["ndcg@10/unseen"]:
            best = {"validation": figures, "epoch": epoch, "train_s": round(seconds, 1)}
            state = copy.deepcopy(model.state_dict())
        elif epoch - best["epoch"] >= args.patience:
            break
    assert state is not None
    model.load_state_dict(state)
    return {**best, "test": evaluate(model, data, 1), "epoch_s": round(seconds / epoch, 2)}


COUNTS = {"counted in the training rows": "data", "estimated": "null"}


def movielens(args: argparse.Namespace) -> None:
    """The towers of the config over seeds, with either q of an item."""
    config = Path(__file__).parents[2] / "data/movielens/two_tower.yaml"
    for name, counts in COUNTS.items():
        found = []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                changes = [f"trainer.seed={seed}", f"model.loss.counts={counts}", f"storage.path={folder}"]
                changes += [f"data.{part}.path={args.data / part}" for part in ("train", "eval")]
                result = Trainer(load_config(config, changes)).fit()
            assert result.eval is not None
            found.append({key: result.eval[key] for key in ("recall@10", "ndcg@10", "recall@50")})
        mean = {key: round(float(np.mean([one[key] for one in found])), 4) for key in found[0]}
        spread = round(float(np.std([one["recall@10"] for one in found])), 4)
        line = {"two_tower": f"q {name}", "seeds": args.seeds, **mean, "deviation of recall@10": spread}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["beauty", "movielens"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", choices=sorted(MAKERS), default="sasrec")
    parser.add_argument("--set", default="{}", help="JSON over the model's settings")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--patience", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="of movielens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "movielens":
        movielens(args)
        return
    data = Sequences.read(args.data)
    given = json.loads(args.set)
    settings = {**SETTINGS[args.model], **given}
    settings["loss"] = {**SETTINGS[args.model]["loss"], **given.get("loss", {})}
    print(json.dumps({"users": len(data.rows), "items": data.num_items, "popularity": popularity(data)}), flush=True)
    print(json.dumps({"model": args.model, "settings": settings, **train(data, args, settings)}))


if __name__ == "__main__":
    main()
