"""SASRec on long histories beside popularity and beside a plain transformer of torch, trained on the same rows.

    python jobs/experiments/next_item.py ml_latest_small_ratings.csv.gz

The last movie of each user is the test, the one before it validation, which chooses the epoch of both. The peer pads,
has torch's own encoder layers, the same width, loss, batch and number of steps, and is scored by the same ranking.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

from rayrec.metrics.ranking import Jagged, RankingMetrics, target_ranks
from rayrec.train import Trainer, load_config

CONFIG = Path(__file__).resolve().parents[2] / "data/movielens/next_item.yaml"
PARTS = ("train", "validation", "test")
LENGTH, DIM, NEGATIVES, TEMPERATURE = 200, 64, 512, 0.05


def rayrec(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rayrec.cli", *words], check=True, stdout=subprocess.DEVNULL)


def prepare(ratings: Path) -> None:
    """Writes the rows of the three parts and the vocabulary to the working folder."""
    with gzip.open(ratings) as source, open("ratings.csv", "wb") as target:
        shutil.copyfileobj(source, target)
    columns = ["--user", "userId", "--time", "timestamp", "--column", "movieId"]
    rayrec("data", "sequence", "ratings.csv", "--out", "rows", *columns, "--rows", "users", "--split", "position")
    rayrec("data", "vocabulary", "ratings.csv", "--column", "movieId", "--out", "vocabulary.parquet")


class Peer(nn.Module):
    """A causal transformer over padded rows; item 0 is padding."""

    def __init__(self, items: int, dropout: float) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, DIM), nn.Embedding(LENGTH, DIM)
        for table in (self.items, self.places):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(DIM, 1, DIM, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_BN: torch.Tensor) -> torch.Tensor:
        """Rows are padded at their start, so the last place is the newest item."""
        length = rows_BN.shape[1]
        places = torch.arange(length - 1, -1, -1)
        x = self.dropout(self.items(rows_BN) * DIM**0.5 + self.places(places))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = (hidden[None] | (rows_BN == 0)[:, None, :]) & ~torch.eye(length, dtype=torch.bool)
        return F.normalize(self.encoder(x, mask=mask), dim=2)


def padded(rows: list[list[int]]) -> torch.Tensor:
    length = max(map(len, rows))
    return torch.tensor([[0] * (length - len(row)) + row for row in rows])


@torch.no_grad()
def evaluate(model: Peer, rows: list[list[int]]) -> dict[str, float]:
    """The last item of each row among all items without those before it."""
    model.eval()
    vectors = F.normalize(model.items.weight[1:], dim=1)
    queries = torch.cat([model(padded([row[-LENGTH - 1 : -1]]))[:, -1] for row in rows])
    seen = [[item - 1 for item in row[:-1]] for row in rows]
    offsets = torch.tensor([0, *map(len, seen)]).cumsum(0)
    jagged = Jagged(torch.tensor([item for row in seen for item in row]), offsets)
    ranks = target_ranks(queries, vectors, torch.tensor([row[-1] - 1 for row in rows]), jagged)
    model.train()
    return RankingMetrics.of(ranks, (10,), filtered=False).metrics()


def train_peer(parts: dict[str, list[list[int]]], items: int, epochs: int, batch: int, lr: float) -> dict[str, float]:
    torch.manual_seed(0)
    model, random = Peer(items + 1, 0.3), np.random.default_rng(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    best, found = -1.0, {}
    for _ in range(epochs):
        order = random.permutation(len(parts["train"]))
        for start in range(0, len(order), batch):
            rows = [parts["train"][row][-LENGTH - 1 :] for row in order[start : start + batch]]
            inputs, targets = padded([row[:-1] for row in rows]), padded([row[1:] for row in rows])
            query, real = model(inputs), targets > 0
            negatives = torch.randint(1, items + 1, (NEGATIVES,))
            positive, drawn = (F.normalize(model.items(ids), dim=-1) for ids in (targets[real], negatives))
            scores = query[real] @ drawn.T / TEMPERATURE - np.log(NEGATIVES / items)
            scores = scores.masked_fill(negatives == targets[real][:, None], float("-inf"))
            own = (query[real] * positive).sum(1, keepdim=True) / TEMPERATURE - np.log(NEGATIVES / items)
            loss = F.cross_entropy(torch.cat([own, scores], dim=1), torch.zeros(len(own), dtype=torch.int64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation = evaluate(model, parts["validation"])["ndcg@10"]
        if validation > best:
            best, found = validation, evaluate(model, parts["test"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    ratings = args.ratings.resolve()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(ratings)
        changes = [f"trainer.epochs={args.epochs}", f"schema.sparse.movieId.mapping.path={folder}/vocabulary.parquet"]
        config = load_config(CONFIG, changes)
        start = time.perf_counter()
        result = Trainer(config).fit()
        assert result.test is not None
        for name, metrics in (("popularity", result.test["popularity"]), ("rayrec's SASRec", result.test)):
            line = {key: round(metrics[key], 4) for key in ("recall@10", "ndcg@10")}
            print(json.dumps({"model": name, **line}), flush=True)
        print(json.dumps({"steps": result.steps, "seconds": round(time.perf_counter() - start, 1)}), flush=True)
        ids = pq.read_table("vocabulary.parquet").column(0).to_pylist()
        row_of = {item: row for row, item in enumerate(ids, 1)}
        parts = {part: pq.read_table(f"rows/{part}").column("movieId").to_pylist() for part in PARTS}
        rows = {part: [[row_of[item] for item in row] for row in of if len(row) > 1] for part, of in parts.items()}
        start = time.perf_counter()
        found = train_peer(rows, len(ids), args.epochs, config.trainer.batch_size, config.optimizers.dense.lr)
        line = {"recall@10": round(found["hr@10"], 4), "ndcg@10": round(found["ndcg@10"], 4)}
        print(json.dumps({"model": "torch", **line, "seconds": round(time.perf_counter() - start, 1)}), flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
