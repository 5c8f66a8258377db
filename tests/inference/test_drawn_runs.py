"""Drawn schemas, tables and plans: trained on two ranks, exported, scored as the sharded model scores."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rayrec.inference import ExportOptions, Model
from rayrec.models import Batch
from rayrec.train import export_run
from tests.inference.runs import evaluating_learner, trained_run, write_config
from tests.ranks import PerRank, on_ranks
from tests.train import small

RANKS = 2
KINDS = ("id", "id_list", "weighted_id_list")
CUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")
MODELS: dict[str, dict[str, Any]] = {
    "dcn": {"dense_arch": [], "over_arch": [8, 1], "cross_layers": 1},
    "deepfm": {"deep_arch": [8, 1]},
}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """What differs from `small.RAW`: features, tables that read them, a model and how each table is cut."""
    features: list[dict[str, Any]] = []
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(KINDS))
        feature = {"name": f"f{i}", "kind": kind, "mapping": {"kind": "hash", "seed": draw(st.integers(0, 9))}}
        features.append({**feature, "weight_column": f"w{i}"} if kind == "weighted_id_list" else feature)
    names, tables, model = [feature["name"] for feature in features], [], draw(st.sampled_from(sorted(MODELS)))
    shared = 4 * draw(st.integers(2, 4))
    for i in range(draw(st.integers(1, 4))):
        read = [names[i]] if i < len(names) else draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        dim = shared if model == "deepfm" else draw(st.integers(8, 17))
        pooling = draw(st.sampled_from(["sum", "mean"]))
        tables.append(
            {"name": f"t{i}", "rows": draw(st.integers(3, 90)), "dim": dim, "pooling": pooling, "features": read}
        )
    for name in names[len(tables) :]:
        tables[-1]["features"].append(name)
    cuts = {table["name"]: {"sharding_types": [draw(st.sampled_from(CUTS))]} for table in tables}
    return {
        "schema__sparse": features,
        "tables": tables,
        "model": {"name": model, "args": MODELS[model]},
        "sharding": {"constraints": cuts},
    }


def write(folder: Path, features: list[dict[str, Any]], rows: int, seed: int) -> None:
    """Ids far apart; lists that are often empty, all of them in some rows."""
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, Any] = {"age": torch.randn(rows, generator=generator).numpy()}
    for feature in features:
        ids = torch.randint(1000, (rows, 3), generator=generator).tolist()
        counts = (torch.randint(0, 4, (rows,), generator=generator) * (torch.arange(rows) % 5 > 0)).tolist()
        if feature["kind"] == "id":
            columns[feature["name"]] = [of[0] for of in ids]
            continue
        columns[feature["name"]] = pa.array([of[:n] for of, n in zip(ids, counts, strict=True)], pa.list_(pa.int64()))
        if "weight_column" in feature:
            weights = [[0.25 * (k + 1) for k in range(n)] for n in counts]
            columns[feature["weight_column"]] = pa.array(weights, pa.list_(pa.float32()))
    columns["label"] = torch.randint(2, (rows,), generator=generator).numpy()
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=40)


def sharded_scores(group: dist.ProcessGroup, raw: dict[str, Any], batches: list[Batch]) -> list[torch.Tensor]:
    """Of the checkpoint's model, sharded over the ranks; each rank gives the scores of its own batches."""
    learner = evaluating_learner(Path(raw["storage"]["path"], raw["name"]), group=group)
    return [learner.score(batch) for batch in batches]


@pytest.mark.long
@settings(max_examples=6, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(changes=runs(), tables=st.sampled_from(["fp32", "fp32", "AUTO"]))
def test_an_export_scores_as_the_sharded_model_it_was_made_of(changes: dict[str, Any], tables: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for part, rows in (("train", 160), ("eval", 90)):
            write(root / part, changes["schema__sparse"], rows, seed=rows)
        raw = small.raw_config(root, trainer__epochs=1, trainer__num_workers=RANKS, **changes)
        run = write_config(raw)
        on_ranks(RANKS, small.fit_on_rank, raw)
        made = export_run(run, root / "model", ExportOptions(tables=tables, force=tables != "fp32"))
        model = Model(made.folder)
        batches = list(trained_run(run).batches())
        batches = batches[: len(batches) // RANKS * RANKS]
        dealt = [batches[rank::RANKS] for rank in range(RANKS)]
        told = on_ranks(RANKS, sharded_scores, raw, PerRank(dealt))
        for own, scores in zip(dealt, told, strict=True):
            for batch, logits in zip(own, scores, strict=True):
                atol = 1e-6 * max(1.0, float(logits.abs().max())) if tables == "fp32" else 0.2
                torch.testing.assert_close(model.score(batch), logits, rtol=0, atol=atol)
