"""Rankers with histories and several tasks: models of one's own, resumed runs, ranks, and configs that are refused.

`test_every_model.py` has the way of each ranker from Parquet to a service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from rayrec.inference import Model
from rayrec.models import Batch, mean_loss
from rayrec.modules import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.modules.pooling import pool_sum
from rayrec.train import ConfigError, Trainer, export_run, parse_config
from tests.inference.runs import trainer_scores
from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, raw_config

ITEMS, GENRES = 40, 5
ATTENTION = [{"history": ["seen", "seen_genre"], "target": ["item", "genre"]}]
ARGS: dict[str, dict[str, Any]] = {
    "din": {"attention": ATTENTION, "attention_hidden": [8], "over_arch": [16, 2]},
    "bst": {"attention": ATTENTION, "over_arch": [16, 2], "max_length": 5, "heads": 2},
    "mmoe": {"experts": 2, "expert": [16], "tower": [8], "attention": ATTENTION, "attention_hidden": [8]},
    "ple": {"expert": [16], "tower": [8], "dropout": 0.1},
    "esmm": {"tower": [16], "attention": [{**ATTENTION[0], "target": ["item", None]}], "attention_hidden": [8]},
}


def rows(count: int, seed: int) -> pa.Table:
    """Some items are liked by all, some by who saw many of their genre; a fifth has no history; purchases follow."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 8, count) * (random.random(count) > 0.2)
    seen = [random.integers(0, ITEMS, n) for n in lengths]
    item = random.integers(0, ITEMS, count)
    genre = item % GENRES
    liked = np.array([(s % GENRES == g).mean() if len(s) else 0.2 for s, g in zip(seen, genre, strict=True)])
    click = (liked + np.sin(1.7 * item) + random.normal(scale=0.2, size=count) > 0.2).astype(np.int64)
    buy = click * (np.sin(item) + random.normal(scale=0.3, size=count) > 0)
    ints = pa.list_(pa.int64())
    return pa.table(
        {
            "item": item,
            "genre": genre,
            "seen": pa.array([s.tolist() for s in seen], ints),
            "seen_genre": pa.array([(s % GENRES).tolist() for s in seen], ints),
            "seen_at": pa.array([(1_600_000_000 + np.arange(len(s))).tolist() for s in seen], ints),
            "age": random.normal(size=count).astype(np.float32),
            "click": click,
            "buy": buy,
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("histories")
    for part, count, seed in (("train", 1200, 0), ("eval", 301, 1)):
        (root / part).mkdir()
        pq.write_table(rows(count, seed), root / part / "rows.parquet", row_group_size=100)
    return root


def config(data: Path, name: str, **changes: Any) -> dict[str, Any]:
    given = {} if name == "esmm" else {"given": "click"}
    return raw_config(
        data,
        name=name,
        schema={
            "labels": [{"name": "click"}, {"name": "buy", "weight": 0.5, **given}],
            "dense": [{"name": "age"}],
            "sparse": [
                {"name": "item"},
                {"name": "genre"},
                {"name": "seen", "kind": "id_list"},
                {"name": "seen_genre", "kind": "id_list"},
            ],
            "sequences": [
                {
                    "name": "history",
                    "ids": ["seen", "seen_genre"],
                    "values": [{"name": "at", "column": "seen_at", "kind": "time"}],
                    "length": 5,
                }
            ],
        },
        tables=[
            {"name": "item", "rows": ITEMS, "dim": 8, "features": ["item", "seen"]},
            {"name": "genre", "rows": GENRES, "dim": 4, "features": ["genre", "seen_genre"]},
        ],
        model={"name": name, "args": ARGS[name]},
        **changes,
    )


def weights(run: Path) -> list[torch.Tensor]:
    return [logits for _, logits in trainer_scores(run)]


def test_esmm_with_a_conversion_that_is_unknown_without_a_click_is_refused(data: Path) -> None:
    raw = config(data, "mmoe")
    raw["model"] = {"name": "esmm", "args": ARGS["esmm"]}
    with pytest.raises(
        ConfigError, match=r"schema\.labels\.1\.given: model esmm .* remove `given: click` of label 'buy'"
    ):
        parse_config(raw)


class OfSequences(nn.Module):
    """A model of one's own that reads its history from `Batch.sequences`."""

    def __init__(self, tables: list[EmbeddingBagConfig], num_dense: int, device: Any = None, **_: Any) -> None:
        super().__init__()
        self.rows = nn.ModuleList()  # a collection each: widths differ
        for table in tables:
            shape = {"num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim}
            made = EmbeddingConfig(name=table.name, feature_names=table.feature_names, **shape)
            self.rows.append(EmbeddingCollection([made]))
        self.score = nn.Linear(12, 2, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        history = batch.sequences["history"]
        found = {name: of for rows in self.rows for name, of in rows(batch.sparse).items()}
        parts = [pool_sum(found[name].values(), history.lengths) for name in history.ids]
        logits = self.score(torch.cat(parts, dim=1))
        return mean_loss(logits, batch), logits


def test_a_model_of_ones_own_reads_its_sequences_in_an_export_too(data: Path, tmp_path: Path) -> None:
    raw = config(data, "din", trainer__epochs=1, storage__path=str(tmp_path / "runs"))
    raw["model"] = {"factory": f"{__name__}:OfSequences"}
    run = Trainer(parse_config(raw)).fit().folder
    model = Model(export_run(run, tmp_path / "model", allow_code=True).folder)
    for batch, logits in trainer_scores(run, OfSequences):
        assert batch.sequences["history"].lengths.any()
        torch.testing.assert_close(model.score(batch), logits, rtol=1e-6, atol=1e-6)


def test_a_run_that_is_resumed_ends_as_one_that_was_not(data: Path, tmp_path: Path) -> None:
    name = "ple"  # with dropout
    whole = config(data, name, trainer__epochs=2, storage__path=str(tmp_path / "whole"))
    Trainer(parse_config(whole)).fit()
    half = config(data, name, trainer__epochs=1, storage__path=str(tmp_path / "half"))
    Trainer(parse_config(half)).fit()
    again = config(data, name, trainer__epochs=2, storage__path=str(tmp_path / "half"))
    Trainer(parse_config(again)).fit()
    one, other = (weights(tmp_path / part / name) for part in ("whole", "half"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_ranks_train_from_files(data: Path, tmp_path: Path) -> None:
    raw = config(data, "din", trainer__epochs=2, storage__path=str(tmp_path))
    results = on_ranks(2, fit_on_rank, raw, timeout_s=350)
    assert results[0]["eval"] == results[1]["eval"] and results[0]["eval"]["auc"] > 0.7


def test_a_target_inside_its_own_history_is_refused(data: Path) -> None:
    raw = config(data, "din")
    raw["schema"]["sparse"][2]["column"] = "item"
    with pytest.raises(ConfigError, match="part of its history"):
        parse_config(raw)
    raw = config(data, "din")
    raw["schema"]["sequences"] = []
    with pytest.raises(ConfigError, match="one sequence"):
        parse_config(raw)


def test_a_piecewise_encoding_of_numbers_that_are_not_in_the_unit_interval_is_refused(data: Path) -> None:
    raw = config(data, "din")
    raw["model"]["args"] = {**raw["model"]["args"], "numbers": "piecewise"}
    with pytest.raises(ConfigError, match=r"schema\.dense\.0\.transforms: .* do not end with `quantile` or `min_max`"):
        parse_config(raw)
    raw["schema"]["dense"][0]["transforms"] = [{"kind": "clip", "lowest": 0.0}, {"kind": "quantile"}]
    parse_config(raw)
