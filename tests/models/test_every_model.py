"""Every built-in ranker is trained, evaluated, exported (fp32, bf16, int8), predicted and served with the same scores.

The names come from the registry, so a new model is tested by itself; `serve/test_retriever_runs.py` has retrievers.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.inference import ExportOptions
from rayrec.inference.predict import predict
from rayrec.models import MODELS
from rayrec.models.arguments import args_of
from rayrec.serve import App, ModelSpec, Service
from rayrec.train import Trainer, evaluate_run, export_run, parse_config
from tests.inference.runs import trainer_scores
from tests.models.test_ranker_runs import ATTENTION, GENRES, ITEMS, rows
from tests.serve.server import Server
from tests.train.small import raw_config

pytestmark = pytest.mark.long(minutes=3)

DIM = 8
REQUIRED = {"over_arch": [16, 2], "deep_arch": [16, 2], "dense_arch": [16, DIM]}
# Settings that all rankers share, on models of each kind: fields, one vector, experts. The others have the defaults.
STYLED: dict[str, dict[str, Any]] = {
    "xdeepfm": {"numbers": "periodic", "activation": "silu", "norm": "layer"},
    "gdcn": {"numbers": "linear", "number_dim": 3, "activation": "dice", "norm": "batch", "dropout": 0.1},
    "din": {"activation": "prelu", "attention_activation": "dice", "softmax": True},
    "hstu_ranker": {"context": ["genre"], "max_length": 5, "local": 4},
    "ple": {"numbers": "piecewise", "activation": "dice", "norm": "batch"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("histories")
    for part, count, seed in (("train", 1200, 0), ("eval", 301, 1)):
        (root / part).mkdir()
        pq.write_table(rows(count, seed), root / part / "rows.parquet", row_group_size=100)
    return root


def config(data: Path, name: str, settings: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Two labels, a number, and two histories of which the model attends to one."""
    required = {arg for arg, field in args_of(name).model_fields.items() if field.is_required()}
    args = {arg: REQUIRED[arg] for arg in required} | {"attention": ATTENTION, "attention_hidden": [8], **settings}
    age: dict[str, Any] = {"name": "age"}
    if settings.get("numbers") == "piecewise":
        edges = [-4.0, *(NormalDist().inv_cdf(share / 16) for share in range(1, 16)), 4.0]
        age["transforms"] = [{"kind": "quantile", "quantiles": 16, "boundaries": edges}]
    ids = [("item", "id"), ("genre", "id"), ("seen", "id_list"), ("seen_genre", "id_list")]
    return raw_config(
        data,
        name=name,
        schema={
            "labels": [{"name": "click"}, {"name": "buy", **({} if name == "esmm" else {"given": "click"})}],
            "dense": [age],
            "sparse": [{"name": feature, "kind": kind} for feature, kind in ids],
            "sequences": [{"name": "history", "ids": ["seen", "seen_genre"], "length": 5}],
        },
        tables=[
            {"name": "item", "rows": ITEMS, "dim": DIM, "features": ["item", "seen"]},
            {"name": "genre", "rows": GENRES, "dim": DIM, "features": ["genre", "seen_genre"]},
        ],
        model={"name": name, "args": args},
        trainer__epochs=3,
        storage__path=str(runs),
    )


@pytest.mark.parametrize("name", MODELS)
def test_trained_evaluated_exported_predicted_and_served(name: str, data: Path, tmp_path: Path) -> None:
    done = Trainer(parse_config(config(data, name, STYLED.get(name, {}), tmp_path / "runs"))).fit()
    assert done.eval is not None and done.eval["auc"] > 0.72, done.eval
    assert evaluate_run(done.folder)["auc"] == done.eval["auc"]
    expected = torch.cat([logits for _, logits in trainer_scores(done.folder)]).sigmoid().numpy()

    plain = export_run(done.folder, tmp_path / "model")
    assert plain.parity.logit_max < 1e-6
    # Both number formats in one export, because to make and compare one takes a quarter of the test.
    made = export_run(done.folder, tmp_path / "small", ExportOptions(dense="bf16", tables="int8", force=True))
    assert made.index.dense_parameters is not None
    assert made.index.bf16_parameters > 0.5 * made.index.dense_parameters
    assert {place.format.value for place in made.index.places} == {"int8"}
    assert 0 < made.parity.logit_max < 0.2  # the errors of both formats add up
    assert made.parity.exported["auc"] == pytest.approx(made.parity.trained["auc"], abs=5e-3)

    predict(plain.folder, str(data / "eval"), tmp_path / "out")
    found = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").glob("part-*.parquet"))])
    table = pq.read_table(data / "eval" / "rows.parquet").drop_columns(["click", "buy"])
    server = Server(App(Service([ModelSpec(name="ctr", path=plain.folder)])))
    try:
        status, answer = server.ask("POST", "/score", {"rows": table.to_pylist()})
    finally:
        server.close()
    assert status == 200, answer
    for column, label in enumerate(("click", "buy")):
        np.testing.assert_allclose(found[f"prediction_{label}"].to_numpy(), expected[:, column], rtol=0, atol=2e-6)
        np.testing.assert_allclose(answer["scores"][label], expected[:, column], rtol=0, atol=2e-6)
