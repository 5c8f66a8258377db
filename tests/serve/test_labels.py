"""Several labels and weighted lists over HTTP: the scores of evaluation, in every form of a request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

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


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(labels=st.dictionaries(st.text(max_size=9), st.lists(FLOATS, max_size=9), max_size=3), name=st.text(max_size=9))
@example(labels={"click": [4e-8, 1e-45, 0.1, 0.5, 1.0, 3e38, -0.0]}, name='"')
def test_json_has_each_score_as_it_is(labels: dict[str, list[float]], name: str) -> None:
    scores = {label: np.array(values, np.float32) for label, values in labels.items()}
    answer = json.loads(_as_json(Answer(name, "v1", scores)))
    assert list(answer) == ["model", "version", "scores"] and (answer["model"], answer["version"]) == (name, "v1")
    assert answer["scores"].keys() == scores.keys()
    for label, values in scores.items():
        assert np.array_equal(np.array(answer["scores"][label], np.float32), values)


def test_json_has_as_few_digits_as_identify_a_score() -> None:
    assert b'{"click": [0.1, 0.5, 0.99999994]}' in _as_json(
        Answer("ctr", "v1", {"click": np.array([0.1, 0.5, 0.99999994], np.float32)})
    )
