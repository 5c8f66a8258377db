"""Several labels and weighted lists over HTTP: the scores of evaluation, in every form of a request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("uvicorn")

from rayrec.serve import ARROW, Answer, App, ModelSpec, Service
from rayrec.serve.http import _as_json
from rayrec.train import export_run
from tests.inference.runs import TWO_LABELS, WEIGHTED, train, trainer_scores, write_weighted
from tests.serve.server import Server
from tests.serve.test_fuzz import stream

COLUMNS = ["user", "item", "tags", "tag_weights", "age"]


def test_served_is_evaluated_for_every_label(tmp_path: Path) -> None:
    run = train(write_weighted(tmp_path / "run"), **{**WEIGHTED, **TWO_LABELS})
    expected = torch.cat([logits for _, logits in trainer_scores(run)]).sigmoid().numpy()
    rows = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "run/eval").iterdir())]).select(COLUMNS)
    server = Server(App(Service([ModelSpec(name="two", path=export_run(run, tmp_path / "model").folder)])))
    try:
        scores = server.ask("POST", "/score", {"rows": rows.to_pylist()})[1]["scores"]
        assert set(scores) == {"click", "like"}
        np.testing.assert_allclose(np.stack([scores["click"], scores["like"]], 1), expected, rtol=0, atol=1e-6)
        found = pa.ipc.open_stream(server.ask("POST", "/score", stream(rows), content_type=ARROW)[1]).read_all()
        assert found.to_pydict() == pytest.approx({label: pytest.approx(of, abs=1e-6) for label, of in scores.items()})
        row, *_ = [row for row in rows.to_pylist() if len(row["tags"]) > 1]
        shared = {name: row[name] for name in ("user", "tags", "tag_weights")}
        others = [{name: of[name] for name in ("item", "age")} for of in rows.slice(0, 7).to_pylist()]
        answers = [
            server.ask("POST", "/score", body)[1]["scores"]
            for body in (
                {"context": shared, "candidates": others},
                {"rows": [{**shared, **other} for other in others]},
            )
        ]
        assert answers[0] == answers[1] and len(answers[0]["like"]) == 7
    finally:
        server.close()


def test_json_has_each_score_as_it_is_however_small() -> None:
    scores = np.array([4e-8, 4.1e-8, 1.2345e-6, 0.1, 0.5, 0.99999994, 1.0], np.float32)
    answer = json.loads(_as_json(Answer("ctr", "v1", {"click": scores})))
    assert np.array_equal(np.array(answer["scores"]["click"], np.float32), scores)
    assert answer["scores"]["click"][3:5] == [0.100000001, 0.5]
