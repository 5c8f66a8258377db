"""Small trained runs to export, and the scores of the trainer's own evaluation on their rows."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import yaml
from torch import nn

from rayrec import Batch, EmbeddingBagCollection, EmbeddingCollection
from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.cli import run as run_command
from rayrec.inference import Trained
from rayrec.models import MODELS
from rayrec.modules import EmbeddingConfig
from rayrec.train import Trainer, parse_config
from rayrec.train.after.export import find_checkpoint, trained_of
from rayrec.train.worker.learner import Learner, make_learner
from rayrec.train.worker.session import session_alone
from tests.train import small
from tests.train.small import Silent, make_job, raw_config, write_all

WEIGHTED = {
    "schema__sparse": [
        {"name": "user", "mapping": {"kind": "hash", "seed": 1}},
        {"name": "item", "mapping": {"kind": "hash", "seed": 0}},
        {"name": "tags", "kind": "weighted_id_list", "weight_column": "tag_weights"},
    ]
}
TWO_LABELS: dict[str, Any] = {
    "schema__label": None,
    "schema__labels": [
        {"name": "click", "column": "label"},
        {"name": "like", "column": "like", "weight": 0.5, "on_null": "ignore"},
    ],
    "model__args": {"dense_arch": [16, 8], "over_arch": [16, 2]},
}


class TwoTowers(nn.Module):
    """A user's own model: a collection inside a tower, another beside it, and a scale that belongs to no layer."""

    def __init__(self, tables: list[Any], num_dense: int, device: Any = None) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=tables[:1], device="meta")})
        self.rest = EmbeddingBagCollection(tables=tables[1:], device="meta")
        self.scale = nn.Parameter(torch.full((8,), 0.5, device=device))
        width = 8 * len(tables[1:]) + num_dense
        self.other = nn.Sequential(nn.Linear(width, 8, device=device), nn.LayerNorm(8, device=device))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self.tower["bags"](batch.sparse).values() * self.scale
        other = self.other(torch.cat([batch.dense, self.rest(batch.sparse).values()], dim=1))
        logits = (mine * other).sum(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits


class Sequences(nn.Module):
    """A user's own model: the tags as a sequence of vectors, whose number it reads itself, beside pooled features."""

    def __init__(self, tables: list[Any], num_dense: int, device: Any = None) -> None:
        super().__init__()
        user, item, tag = tables
        self.bags = EmbeddingBagCollection(tables=[user, item], device="meta")
        seen = EmbeddingConfig(name="tag", num_embeddings=tag.num_embeddings, embedding_dim=8, feature_names=["tags"])
        self.tags = EmbeddingCollection(tables=[seen], device="meta")
        self.over = nn.Linear(8 * 3 + num_dense + 1, 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        count = batch.sparse["tags"].lengths()[:, None].float()
        first = self.tags(batch.sparse)["tags"].to_padded_dense(2).sum(1)
        parts = [batch.dense, self.bags(batch.sparse).values(), first, count]
        logits = self.over(torch.cat(parts, dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits


class AllBuiltIn(nn.Module):
    """A user's own model: the sum of every built-in one, whose name the names of its tables begin with."""

    ARGS: ClassVar[dict[str, dict[str, Any]]] = {
        "dlrm": {"dense_arch": [16, 8], "over_arch": [16, 2]},
        "dcn": {"dense_arch": [8], "over_arch": [16, 2]},
        "deepfm": {"deep_arch": [16, 2]},
    }

    def __init__(self, tables: list[Any], num_dense: int, **settings: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        for name, args in self.ARGS.items():
            own = [table for table in tables if table.name.startswith(name)]
            self.parts[name] = MODELS[name](own, num_dense, **settings, **args)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, logits = zip(*(part(batch) for part in self.parts.values()), strict=True)
        return sum(losses), sum(logits)


def train_all_built_in(root: Path) -> Path:
    """A run of `AllBuiltIn`: lists with weights, a vocabulary, hashed and plain ids, two labels, sums and means; widths
    that differ where the model takes them; a feature that two tables read."""
    write_weighted(root)
    (root / "cities.txt").write_text("city 1\ncity 3\ncity 5\n")
    vocabulary = {"kind": "vocabulary", "path": str(root / "cities.txt"), "oov_rows": 2}
    kinds = [
        ("user", small.USERS, 8),
        ("item", 80, 5),
        ("tags", small.TAGS, 12),
        ("city", 5, 3),
        ("tags", small.TAGS, 8),
    ]
    tables = [
        {
            "name": f"{name}_{number}",
            "rows": rows,
            "dim": dim if name == "dcn" else 8,
            "pooling": "mean" if number % 2 else "sum",
            "features": [feature],
        }
        for name in AllBuiltIn.ARGS
        for number, (feature, rows, dim) in enumerate(kinds)
    ]
    sparse = [*WEIGHTED["schema__sparse"], {"name": "city", "mapping": vocabulary}]
    labels = {key: value for key, value in TWO_LABELS.items() if key != "model__args"}
    return train(root, AllBuiltIn, model={}, schema__sparse=sparse, tables=tables, **labels)


def write_weighted(root: Path) -> Path:
    """The small data set with a column of weights of the tags; returns its folder."""
    small.write_all(root, rows=300)
    for path in [*(root / "train").iterdir(), *(root / "eval").iterdir()]:
        table = pq.read_table(path)
        weights = [[0.5 + tag for tag in tags] for tags in table["tags"].to_pylist()]
        pq.write_table(table.append_column("tag_weights", pa.array(weights, pa.list_(pa.float32()))), path)
    return root


def train(root: Path, factory: Any = None, rows: int = 300, **changes: Any) -> Path:
    """Trains in this process for one epoch; returns the run folder."""
    if not (root / "train").exists():
        write_all(root, rows=rows)
    raw = raw_config(root, **{"trainer__epochs": 1, **changes})
    return Trainer(parse_config(raw), factory=factory).fit().folder


def write_config(raw: dict[str, Any]) -> Path:
    """Creates the folder of a run that ranks train without a driver, with its config; returns the folder."""
    run = Path(raw["storage"]["path"], raw["name"])
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(parse_config(raw).to_dict()))
    return run


def checkpoint_of(run: Path) -> Checkpoint:
    """The newest checkpoint of a run."""
    return find_checkpoint(run)[1]


def trained_run(run: Path) -> Trained:
    """What an export is made of: the newest checkpoint of a run and its evaluation rows."""
    return trained_of(*find_checkpoint(run))


def command(*words: Any) -> str:
    """What a command prints that succeeds."""
    status, printed, errors = _outcome(*words)
    assert status == 0, printed + errors
    return printed


def refused(*words: Any) -> str:
    """What a command that fails says."""
    status, _, errors = _outcome(*words)
    assert status == 1
    return errors


def _outcome(*words: Any) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = run_command([str(word) for word in words])
    return status, printed.getvalue(), errors.getvalue()


def trainer_scores(run: Path, factory: Any = None) -> list[tuple[Batch, torch.Tensor]]:
    """Every evaluation batch with the logits of the sharded model that the trainer evaluates with."""
    learner, batches = _as_evaluated(run, factory)
    return [(batch, learner.score(batch)) for batch in batches]


def trained_batches(run: Path) -> tuple[nn.Module, list[Batch]]:
    """The sharded model that the trainer evaluates with, and every evaluation batch."""
    learner, batches = _as_evaluated(run)
    return learner.model.module, batches


def _as_evaluated(run: Path, factory: Any = None) -> tuple[Learner, list[Batch]]:
    folder, checkpoint = find_checkpoint(run)
    return evaluating_learner(run, factory), list(trained_of(folder, checkpoint, factory=factory).batches())


def evaluating_learner(run: Path, factory: Any = None, group: dist.ProcessGroup | None = None) -> Learner:
    """The trainer's part of a run's newest checkpoint, ready to evaluate: in this process, or sharded over a group."""
    folder, checkpoint = find_checkpoint(run)
    raw = folder.read_config()
    assert raw is not None
    job = replace(make_job(raw), folder=run, factory=factory, checkpoints=folder.checkpoints)
    learner = make_learner(job, session_alone(Silent()) if group is None else small.rank_session(group))
    CheckpointStore(folder.checkpoints).load(checkpoint, learner.model, group=group)
    learner.model.eval()
    return learner
