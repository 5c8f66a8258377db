"""The feature log: what is served can be trained on, and logging is bounded and never in a request's way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.serve import ARROW, JSON, App, LogConfig, ModelSpec, Service
from rayrec.train import export_run
from tests.inference.runs import train, trainer_scores
from tests.serve.server import GOOD, Server
from tests.serve.test_fuzz import stream
from tests.serve.test_routing import series

COLUMNS = ["user", "item", "tags", "age"]
BODY = json.dumps({"rows": [GOOD]}).encode()


def as_tensors(rows: pa.Table) -> dict[str, Any]:
    """In the open inference protocol."""
    found = [
        {"name": name, "datatype": kind, "shape": [len(rows)], "data": rows[name].to_pylist()}
        for name, kind in (("user", "INT64"), ("item", "INT64"), ("age", "FP64"))
    ]
    tags = rows["tags"].combine_chunks()
    lengths = tags.value_lengths().to_pylist()
    found.append(
        {"name": "tags", "datatype": "INT64", "shape": [len(tags.flatten())], "data": tags.flatten().to_pylist()}
    )
    return {"inputs": [*found, {"name": "tags.lengths", "datatype": "INT64", "shape": [len(rows)], "data": lengths}]}


def send(server: Server, rows: pa.Table) -> dict[str, list[float]]:
    """In parts, each in another form, under the id `part-NUMBER`; returns the scores of each part."""
    parts, lists = [rows.slice(start, 60) for start in range(0, 240, 60)], rows.select(COLUMNS).to_pylist()
    one = {name: lists[-1].pop(name) for name in ("user", "tags")}
    sent: list[tuple[str, Any, dict[str, str]]] = [
        ("/score", {"rows": lists[:60]}, {}),
        ("/score", {"rows": parts[1].select(COLUMNS).to_pydict()}, {}),
        ("/score", stream(parts[2].select(COLUMNS)), {"content_type": ARROW, "accept": JSON}),
        ("/v2/models/ctr/infer", as_tensors(parts[3]), {}),
        ("/score", {"rows": lists[240:299]}, {}),
        ("/score", {"context": one, "candidates": [lists[-1]]}, {}),
    ]
    scores = {}
    for number, (path, body, headers) in enumerate(sent):
        status, answer = server.ask("POST", path, body, x_request_id=f"part-{number}", **headers)
        assert status == 200, answer
        found = answer["outputs"][0]["data"] if "outputs" in answer else answer["scores"]["label"]
        scores[f"part-{number}"] = found
    return scores


def test_what_was_logged_and_joined_with_labels_trains_the_same_model(tmp_path: Path) -> None:
    run = train(tmp_path / "a")
    rows = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "a/train").iterdir())])
    log = LogConfig(folder=tmp_path / "log", share=1.0)
    service = Service([ModelSpec(name="ctr", path=export_run(run, tmp_path / "model").folder)], log=log)
    server = Server(App(service))
    scores = send(server, rows)
    server.close()
    service.close()
    assert series(service, "rayrec_logged_requests_total") and not list((tmp_path / "log/ctr").glob(".*"))
    (file,) = (tmp_path / "log/ctr").iterdir()
    logged = pq.read_table(file).sort_by([("_request", "ascending"), ("_row", "ascending")])
    for name in COLUMNS:
        assert logged[name].to_pylist() == rows[name].to_pylist(), name
    assert logged["_score"].to_pylist() == pytest.approx([one for part in scores.values() for one in part], abs=1e-7)
    assert set(logged["_version"].to_pylist()) == {service.health()["models"][0]["version"]}
    assert max(logged["_time"].to_pylist()) <= time.time()

    # the labels come later, by request and row
    sizes = [len(scores[part]) for part in sorted(scores)]
    keys = [(part, row) for part, size in zip(sorted(scores), sizes, strict=True) for row in range(size)]
    labels = dict(zip(keys, rows["label"].to_pylist(), strict=True))
    of_row = zip(logged["_request"].to_pylist(), logged["_row"].to_pylist(), strict=True)
    joined = logged.append_column("label", pa.array([labels[key] for key in of_row]))
    other = tmp_path / "b"
    for part in ("train", "eval"):
        (other / part).mkdir(parents=True)
        for path in (tmp_path / "a" / part).iterdir():
            pq.write_table(pq.read_table(path), other / part / path.name, row_group_size=64)
    start = 0
    for path in sorted((other / "train").iterdir()):
        count = pq.read_metadata(path).num_rows
        pq.write_table(joined.slice(start, count), path, row_group_size=64)
        start += count
    for (_, expected), (_, found) in zip(trainer_scores(run), trainer_scores(train(other)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_files_have_one_schema_whatever_form_a_request_had_and_can_be_scored_again(model: Path, tmp_path: Path) -> None:
    service = Service([ModelSpec(name="ctr", path=model)], log=LogConfig(folder=tmp_path, share=1.0, file_rows=1))
    rows = pa.table({name: [value] * 2 for name, value in GOOD.items()})
    large = rows.set_column(1, "item", pa.array([2**63 + 5, 7], pa.uint64()))
    encoded = rows.set_column(4, "city", rows["city"].dictionary_encode()).set_column(
        2, "tags", rows["tags"].combine_chunks().cast(pa.large_list(pa.int16()))
    )
    floats = {**GOOD, "user": 1.0, "age": 1, "tags": []}  # whole numbers as pandas and JavaScript write them
    shared = {"context": {"tags": [], "city": "city 3"}, "candidates": [{"user": 1, "item": 2, "age": 0}] * 2}
    sent: list[tuple[bytes, str]] = [(stream(table), ARROW) for table in (large, encoded)]
    sent += [(json.dumps(raw).encode(), JSON) for raw in ({"rows": [GOOD, floats]}, {"rows": [floats]}, shared)]
    scores = [service.score(body, kind).scores["label"].tolist() for body, kind in sent]
    service.close()
    files = sorted((tmp_path / "ctr").iterdir())
    tables = [pq.read_table(file) for file in files]
    assert len(files) == len(sent) and all(table.schema == tables[0].schema for table in tables)
    assert tables[0]["item"].to_pylist() == [2**63 + 5 - 2**64, 7]  # the same bits, which are the same id
    assert tables[4]["city"].to_pylist() == ["city 3"] * 2 and tables[4]["tags"].to_pylist() == [[], []]
    for table, expected in zip(tables, scores, strict=True):
        assert table["_score"].to_pylist() == expected
        assert service.score(stream(table), ARROW).scores["label"].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_share_is_drawn_and_files_take_turns(model: Path, tmp_path: Path) -> None:
    log = LogConfig(folder=tmp_path, share=0.25, file_rows=5, files=2)
    service = Service([ModelSpec(name="ctr", path=model)], log=log)
    server = Server(App(service))
    for number in range(200):
        assert server.ask("POST", "/score", BODY, x_request_id=f"r{number}")[0] == 200
    server.close()
    service.close()
    (count,) = series(service, "rayrec_logged_requests_total").values()
    files = sorted((tmp_path / "ctr").iterdir())
    assert 25 <= count <= 75 and len(files) == 2
    assert pq.read_metadata(files[0]).num_rows == 5 and {*pq.read_table(files[0])["_row"].to_pylist()} == {0}


def test_a_log_that_is_slow_or_cannot_be_written_costs_no_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file, no folder")
    service = Service([ModelSpec(name="ctr", path=model)], log=LogConfig(folder=tmp_path / "taken", share=1.0))
    begin = time.perf_counter()
    for _ in range(5):
        service.score(BODY, JSON)
    service.close()
    assert (
        series(service, "rayrec_logged_requests_total")[
            '{model="ctr",outcome="lost file"'.join(
                ["rayrec_logged_requests_total", f',replica="{service.stats.replica}"}}']
            )
        ]
        == 1
    )
    slow = Service([ModelSpec(name="ctr", path=model)], log=LogConfig(folder=tmp_path / "log", share=1.0))
    assert slow._feature_log is not None
    monkeypatch.setattr(slow._feature_log._worker, "_work", lambda item: time.sleep(0.5))
    begin = time.perf_counter()
    for _ in range(100):
        slow.score(BODY, JSON)
    assert time.perf_counter() - begin < 10
    (dropped,) = [value for key, value in series(slow, "rayrec_logged_requests_total").items() if "dropped" in key]
    assert dropped >= 30, "64 fit the queue"
