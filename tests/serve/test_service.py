"""The service over real HTTP: scores are those of prediction and training, bad input is a 4xx, versions swap."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import shutil
import socket
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.inference import ExportError, ExportStore, write_delta
from rayrec.serve import ARROW, JSON, Answer, App, ModelSpec, RequestError, Service, versions
from rayrec.serve.service import freeze_garbage
from rayrec.storage.checksums import checksum
from rayrec.train import export_run
from tests.inference.runs import train, trainer_scores
from tests.serve.server import GOOD, Server, clients_of

uvicorn = pytest.importorskip("uvicorn")


def evaluation_rows(run: Path) -> pa.Table:
    files = sorted((run.parent.parent / "eval").iterdir())
    table = pa.concat_tables([pq.read_table(path) for path in files])
    return table.select(["user", "item", "tags", "age", "city"])


def test_served_is_evaluated_row_by_row_as_json_and_arrow(run: Path, server: Server) -> None:
    table = evaluation_rows(run)
    expected = torch.cat([logits for _, logits in trainer_scores(run)]).sigmoid().numpy()
    status, answer = server.ask("POST", "/score", {"rows": table.to_pylist()})
    assert status == 200 and answer["model"] == "ctr"
    np.testing.assert_allclose(answer["scores"]["label"], expected, rtol=0, atol=2e-6)
    assert server.ask("POST", "/score/ctr", {"rows": table.to_pydict()}) == (200, answer)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    status, raw = server.ask("POST", "/score", bytes(sink.getvalue()), content_type=ARROW)
    found = pa.ipc.open_stream(raw).read_all()
    np.testing.assert_allclose(found["label"].to_numpy(), expected, rtol=0, atol=2e-6)
    assert found.schema.metadata[b"version"].decode() == answer["version"]


@pytest.mark.parametrize("context", [["user"], ["tags", "age"], ["user", "tags", "age", "city"], ["city", "item"]])
def test_a_context_is_a_part_of_every_candidate(run: Path, server: Server, context: list[str]) -> None:
    rows = evaluation_rows(run).to_pylist()[:7]
    shared = {name: rows[0][name] for name in context}
    candidates = [{name: value for name, value in row.items() if name not in context} for row in rows]
    status, answer = server.ask("POST", "/score", {"context": shared, "candidates": candidates})
    whole = server.ask("POST", "/score", {"rows": [{**row, **shared} for row in rows]})[1]
    assert status == 200
    np.testing.assert_allclose(answer["scores"]["label"], whole["scores"]["label"], rtol=0, atol=1e-6)


def test_a_long_context_is_looked_up_once(server: Server) -> None:
    """30,000 ids, were every candidate to have them; a request may have 5,000."""
    context = {name: value for name, value in GOOD.items() if name != "item"} | {"tags": [1, 3] * 150}
    candidates = [{"item": item} for item in range(100)]
    status, answer = server.ask("POST", "/score", {"context": context, "candidates": candidates})
    assert status == 200
    whole = [server.ask("POST", "/score", {"rows": [{**context, **row}]})[1] for row in candidates[:3]]
    expected = [one["scores"]["label"][0] for one in whole]
    np.testing.assert_allclose(answer["scores"]["label"][:3], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"user": -1}, 422, "'user'"),
        ({"user": 10**30}, 422, "user"),
        ({"user": 40}, 422, "outside its table's rows"),
        ({"user": "x"}, 422, "(row 1)"),
        ({"user": None}, 422, "null"),
        ({"user": 1.5}, 422, "whole number"),
        ({"user": [1]}, 422, "user"),
        ({"tags": [1, -1]}, 422, "'tags'"),
        ({"tags": 1}, 422, "list"),
        ({"tags": [[1]]}, 422, "tags"),
        ({"age": "old"}, 422, "(row 1)"),
        ({"age": None}, 422, "null"),
        ({"age": 1e300}, 422, "age"),
        ({"city": 7}, 422, "(row 1)"),
    ],
)
def test_a_bad_value_is_refused_with_feature_row_and_fix(
    server: Server, change: dict[str, Any], status: int, text: str
) -> None:
    found, answer = server.ask("POST", "/score", {"rows": [GOOD, {**GOOD, **change}]})
    assert found == status and text in answer["error"], answer
    told = answer["errors"][0]
    assert told["fix"] and told["column"] == next(iter(change))
    if not isinstance(next(iter(change.values())), list):
        assert told["row"] == 1 or "whole number" in text, told
        assert told["feature"] in ({"city": "place"}.get(next(iter(change)), next(iter(change))),)


def test_hashed_ids_of_the_other_type_are_refused(server: Server) -> None:
    status, answer = server.ask("POST", "/score", {"rows": [{**GOOD, "item": "2"}] * 2})
    assert (status, answer["errors"][0]["feature"]) == (422, "item") and "was trained on integer ids" in answer["error"]
    status, schema = server.ask("GET", "/schema")
    types = {feature["name"]: feature["id_type"] for feature in schema["sparse"]}
    assert types == {"user": "integer", "item": "integer", "tags": "integer", "place": "text"}


def test_the_only_row_that_says_a_column_is_the_one_that_is_wrong(server: Server) -> None:
    rows = [{**GOOD, "tags": None}, {**GOOD, "tags": [[1]]}, {name: GOOD[name] for name in GOOD if name != "tags"}]
    found, answer = server.ask("POST", "/score", {"rows": rows})
    assert (found, answer["errors"][0]["row"], answer["errors"][0]["column"]) == (422, 1, "tags"), answer


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "nested"),
        (b'{"rows": [{"user": NaN}]}', 400, "NaN"),
        ({"rows": []}, 422, "no rows"),
        ({"rows": 3}, 400, "list of objects"),
        ({"rows": [GOOD], "context": {"user": 1}}, 400, "context"),
        ({"other": []}, 400, "the body must be"),
        ({"rows": [GOOD], "model": "other"}, 400, "the path names a model"),
        ({"context": {"user": 1}, "candidates": [GOOD]}, 422, "in the context and in the candidates"),
        ({"rows": [{"user": 1}]}, 422, "column 'age' is missing; send it in every row"),
        ({"rows": [GOOD] * 501}, 413, "501 rows"),
        ({"rows": {"user": [1, 2], "item": [1], "tags": [[]], "age": [1.0], "city": ["a"]}}, 422, "unequal lengths"),
        ({"rows": [{**GOOD, "tags": [1] * 300}] * 20}, 413, "ids"),
        (b" " * (2 << 20), 413, "bytes"),
    ],
)
def test_a_bad_body_is_refused(server: Server, body: Any, status: int, text: str) -> None:
    found, answer = server.ask("POST", "/score", body)
    assert found == status and text in answer["error"], answer


def test_other_paths_methods_and_types_are_4xx(server: Server) -> None:
    assert server.ask("GET", "/score")[0] == 405
    assert server.ask("GET", "/other")[0] == 404
    assert server.ask("POST", "/score/none", {"rows": [GOOD]})[0] == 404
    assert server.ask("POST", "/score", b"x", content_type="text/plain")[0] == 415
    assert server.ask("POST", "/score", b"x", content_type=ARROW)[0] == 400


def test_a_token_is_asked_for_everywhere_but_health(service: Service, tmp_path: Path) -> None:
    server = Server(App(service, clients_of(tmp_path, one="s3cret")))
    try:
        assert server.ask("POST", "/score", {"rows": [GOOD]})[0] == 401
        assert server.ask("GET", "/metrics", authorization="Bearer wrong")[0] == 401
        status, anyone = server.ask("GET", "/healthz")
        told = service.health()
        models = [{"name": "ctr", "version": told["models"][0]["version"]}]
        assert status == 200 and anyone == {**told, "models": models}
        assert server.ask("GET", "/healthz", authorization="Bearer s3cret")[1] == service.health()
        assert server.ask("POST", "/score", {"rows": [GOOD]}, authorization="Bearer s3cret")[0] == 200
    finally:
        server.close()


def test_a_score_that_is_not_finite_is_no_answer(tmp_path: Path) -> None:
    run = train(tmp_path, optimizers__dense__lr=3.0)  # weights above 1, so that sums overflow
    service = Service([ModelSpec(path=export_run(run, tmp_path / "model").folder)])
    good = {name: GOOD[name] for name in ("user", "item", "tags", "age")}
    far = {**good, "age": 3e38}  # a finite float32

    def read(*rows: dict[str, Any]) -> Any:
        return service.read(json.dumps({"rows": rows}).encode(), JSON)

    first, wrong, last = service.answers([read(good), read(good, far), read(good, good)])
    assert isinstance(first, Answer) and isinstance(last, Answer)
    assert isinstance(wrong, RequestError) and wrong.status == 422
    assert "1 of 2 rows" in wrong.text and "row 1" in wrong.text


def test_nothing_of_a_request_is_kept_or_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Planted: the token, a wrong one, and values of good rows, of bad ones, and of a request that is no JSON."""
    secrets = ["pl4nted-token", "pl4nted-guess", "pl4nted-city", "pl4nted-user", "pl4nted-text", "pl4nted-query"]
    token, guess, city, user, text, query = secrets
    service = Service([ModelSpec(name="ctr", path=model)])
    server = Server(App(service, clients_of(tmp_path, one=token)))
    caplog.set_level(logging.DEBUG)  # now that nothing is compiled any more
    try:
        known = {"authorization": f"Bearer {token}"}
        assert server.ask("POST", "/score", {"rows": [GOOD]}, authorization=f"Bearer {guess}")[0] == 401
        assert server.ask("POST", "/score", {"rows": [{**GOOD, "city": city}]}, **known)[0] == 200
        assert server.ask("POST", f"/score?key={query}", {"rows": [{**GOOD, "user": user}]}, **known)[0] == 422
        assert server.ask("POST", "/score", f'{{"rows": {text}'.encode(), **known)[0] == 400
        metrics = server.ask("GET", "/metrics", **known)[1].decode()
    finally:
        server.close()
    written = capfd.readouterr()
    everywhere = "\n".join([metrics, caplog.text, written.out, written.err, repr(service.events)])
    assert not [secret for secret in secrets if secret in everywhere]


def test_metrics_tell_rows_status_and_unknown_ids_by_replica(model: Path) -> None:
    service = Service([ModelSpec(name="ctr", path=model)])
    server = Server(App(service))
    try:
        server.ask("POST", "/score", {"rows": [GOOD, {**GOOD, "city": "nowhere"}]})
        server.ask("POST", "/score", b"{")
        text = server.ask("GET", "/metrics")[1].decode()
    finally:
        server.close()
    by = f'replica="{socket.gethostname()}:{os.getpid()}"'
    assert f'rayrec_requests_total{{model="ctr",{by},status="200"}} 1.0' in text
    assert f'rayrec_requests_total{{model="ctr",{by},status="400"}} 1.0' in text
    assert f'rayrec_unknown_ids_total{{feature="place",model="ctr",{by}}} 1.0' in text
    assert f'rayrec_ids_total{{feature="place",model="ctr",{by}}} 2.0' in text
    assert "rayrec_request_seconds_bucket" in text


def another_version(model: Path, target: Path, **index: Any) -> Path:
    """A copy under another version's name."""
    shutil.copytree(model, target.with_name(f".{target.name}"))
    file = target.with_name(f".{target.name}") / "export.json"
    raw = json.loads(file.read_text())
    raw.update({"version": target.name, **index})
    file.write_text(json.dumps(raw))
    os.rename(target.with_name(f".{target.name}"), target)
    return target


def version_of(model: Path, target: Path, value: float) -> Path:
    """Another version, whose table of users holds this number alone: its scores are its own."""
    folder = another_version(model, target)
    data = bytearray((folder / "tables.bin").read_bytes())
    data[: 40 * 8 * 4] = np.full(40 * 8, value, np.float32).tobytes()
    (folder / "tables.bin").write_bytes(data)
    raw = json.loads((folder / "export.json").read_text())
    raw["files"]["tables.bin"][1] = checksum(folder / "tables.bin")
    (folder / "export.json").write_text(json.dumps(raw))
    return folder


def test_versions_swap_under_load_and_no_answer_mixes_them(model: Path, tmp_path: Path) -> None:
    """Every version has its own table bytes, so that an answer tells which one it came from."""
    root = tmp_path / "models"
    root.mkdir()
    expected: dict[str, Any] = {}
    for number in range(3):
        folder = version_of(model, root / f"v{number}", number / 2)
        service = Service([ModelSpec(name="ctr", path=folder)])
        expected[f"v{number}"] = service.score(json.dumps({"rows": [GOOD] * 20}).encode(), JSON).scores["label"][0]
    assert len(set(expected.values())) == 3
    (root / "current").write_text("v0")
    service, found, stop = Service([ModelSpec(name="ctr", path=root)]), [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            answer = service.score(json.dumps({"rows": [GOOD] * 20}).encode(), JSON)
            found.append((answer.version, answer.scores["label"]))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in (1, 2, 0, 2, 1):
        (root / "current").write_text(f"v{number}")
        assert service.refresh() == 1
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert {version for version, _ in found} == set(expected)
    for version, scores in found:
        assert (scores == expected[version]).all()


def test_a_service_follows_deltas_and_no_answer_mixes_versions(model: Path, tmp_path: Path) -> None:
    """A lost delta leaves the old version, until it comes or a full export; an earlier version can be taken again."""
    exports = [version_of(model, tmp_path / "full" / f"v{number}", number / 2) for number in range(5)]
    root = tmp_path / "models"
    shutil.copytree(exports[0], root / "v0")
    after, expected = None, dict[str, Any]()
    for number, (old, new) in enumerate(itertools.pairwise(exports), 1):
        after = write_delta(old, new, tmp_path / f"v{number}", after)
    for folder in exports:
        service = Service([ModelSpec(name="ctr", path=folder)])
        expected[folder.name] = service.score(json.dumps({"rows": [GOOD] * 20}).encode(), JSON).scores["label"][0]
    service, found, stop = Service([ModelSpec(name="ctr", path=root)]), [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            answer = service.score(json.dumps({"rows": [GOOD] * 20}).encode(), JSON)
            found.append((answer.version, answer.scores["label"]))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        (tmp_path / "v1").rename(root / "v1")
        assert service.refresh() == 1 and service.health()["models"][0]["version"] == "v1"
        (tmp_path / "v3").rename(root / "v3")  # without v2
        assert service.refresh() == 0 and service.health()["models"][0]["version"] == "v1"
        assert "since the version v2, which is not in" in service.health()["models"][0]["refused"]["delta"]
        assert [event[1] for event in service.events] == ["loaded", "refused"]
        (tmp_path / "v2").rename(root / "v2")
        assert service.refresh() == 1 and service.health()["models"][0]["version"] == "v3"
        assert not service.health()["models"][0]["refused"]
        (root / "current").write_text("v1")
        assert service.refresh() == 1 and service.health()["models"][0]["version"] == "v1"
        (root / "current").unlink()
        data = bytearray((tmp_path / "v4" / "rows" / "tables.bin").read_bytes())
        data[-1] ^= 1
        (tmp_path / "v4" / "rows" / "tables.bin").write_bytes(data)
        (tmp_path / "v4").rename(root / "v4")
        assert service.refresh() == 0 and "wrong checksum" in service.health()["models"][0]["refused"]["v4"]
        shutil.copytree(exports[4], root / "v4-full")
        assert service.refresh() == 1
        time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert {version for version, _ in found} >= {"v1", "v3", "v4"}
    for version, scores in found:
        assert (scores == expected[version]).all()
    # A replica that was off takes the newest version at once, from the full export and the deltas since.
    for name in ("v4", "v4-full"):
        shutil.rmtree(root / name)
    late = Service([ModelSpec(name="ctr", path=root)])
    assert late.health()["models"][0]["version"] == "v3"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["v9", "v10", "v2"], "v10"),
        (["20260131-235959-ff", "20260201-000000-0a"], "20260201-000000-0a"),
        (["2026-1-9", "2026-1-31", "2025-12-31"], "2026-1-31"),
        (["v1", "v01"], "v1"),
        (["10", "v1", "9"], "v1"),
    ],
)
def test_the_newest_is_the_last_by_name_with_numbers_as_numbers(
    tmp_path: Path, names: list[str], expected: str
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "export.json").touch()
    assert ExportStore(tmp_path, 0).newest().name == expected


def test_a_refused_version_is_not_read_again_before_it_changes(model: Path, tmp_path: Path) -> None:
    """Whatever is wrong with it; here its vocabulary, mended without a trace in sizes and times."""
    another_version(model, tmp_path / "v1")
    service = Service([ModelSpec(name="ctr", path=tmp_path)])
    bad = another_version(model, tmp_path / "v2")
    cities, index = bad / "vocabularies" / "0.txt", bad / "export.json"
    cities.with_name("0.txt.index").unlink()  # with which the vocabulary itself is not read
    raw = json.loads(index.read_text())
    del raw["files"]["vocabularies/0.txt.index"]
    index.write_text(json.dumps(raw))
    before = cities.read_text(), index.read_text()
    cities.write_text(before[0].replace("city 3", "city 1"))
    raw["files"]["vocabularies/0.txt"][1] = checksum(cities)
    size = index.stat().st_size + 9
    index.write_text(json.dumps(raw).ljust(size))
    times = [(path, path.stat().st_mtime_ns) for path in (cities, index)]
    assert service.refresh() == 0
    assert "in the vocabulary twice" in service.health()["models"][0]["refused"]["v2"]
    for (path, time_ns), text in zip(times, before, strict=True):
        path.write_text(text.ljust(size) if path == index else text)
        os.utime(path, ns=(time_ns, time_ns))
    assert service.refresh() == 0
    index.touch()
    assert service.refresh() == 1


def test_what_stays_refused_is_read_ever_more_seldom(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_version(model, tmp_path / "v1")
    service = Service([ModelSpec(name="ctr", path=tmp_path)])
    with open(another_version(model, tmp_path / "v2") / "tables.bin", "r+b") as file:
        file.write(b"\x01")
    clock, reads, opened = [0], list[int](), ExportStore.open

    def read(exports: ExportStore, export: Any) -> Any:
        reads.append(clock[0])
        return opened(exports, export)

    monkeypatch.setattr(versions, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ExportStore, "open", read)
    for clock[0] in range(0, 9000, 10):
        assert service.refresh() == 0
    assert reads == [0, 10, 30, 70, 150, 310, 630, 1270, 2550, 5110, 8710]  # an hour apart at most


@pytest.mark.parametrize("fault", ["checksum", "half", "deleted", "parity", "outside"])
def test_a_bad_version_is_refused_by_name_and_the_old_one_answers(model: Path, tmp_path: Path, fault: str) -> None:
    root = tmp_path / "models"
    root.mkdir()
    another_version(model, root / "v1")
    service = Service([ModelSpec(name="ctr", path=root)])
    bad, text = another_version(model, root / "v2"), "v2"
    if fault == "checksum":
        with open(bad / "tables.bin", "r+b") as file:
            file.write(b"\x01")
        text = "checksum"
    elif fault == "half":
        (bad / "graph.pt2").unlink()
        text = "graph.pt2 is missing"
    elif fault == "deleted":
        shutil.rmtree(root)
        text = "has no export"
    elif fault == "parity":
        parity = json.loads((bad / "parity.json").read_text())
        (bad / "parity.json").write_text(json.dumps({**parity, "within_limits": False}))
        raw = json.loads((bad / "export.json").read_text())
        raw["files"]["parity.json"] = [(bad / "parity.json").stat().st_size, checksum(bad / "parity.json")]
        (bad / "export.json").write_text(json.dumps(raw))
        text = "outside their limits"
    else:
        (root / "current").write_text("../elsewhere")
        text = "not in this folder"
    assert service.refresh() == 0
    (told,) = service.health()["models"]
    assert told["version"] == "v1" and text in next(iter(told["refused"].values()))
    assert service.score(json.dumps({"rows": [GOOD]}).encode(), JSON).version == "v1"
    if fault == "checksum":
        assert service.refresh() == 0
        (bad / "tables.bin").write_bytes((root / "v1" / "tables.bin").read_bytes())
        assert service.refresh() == 1, "a version that was mended takes over"


def test_the_collector_passes_over_what_was_there_first_and_a_version_that_has_gone_is_freed(
    model: Path, tmp_path: Path
) -> None:
    """It would look at all of torch again and again while requests wait."""
    another_version(model, tmp_path / "v1")
    service = Service([ModelSpec(name="ctr", path=tmp_path)])
    ((_, versions),) = service._models["ctr"]
    before = weakref.ref(versions.active.model)
    try:
        freeze_garbage()
        assert gc.get_freeze_count() > 100_000 > sum(gc.get_count()) and before() is not None
        another_version(model, tmp_path / "v2")
        assert service.refresh() == 1
        assert before() is None, "its tables are mapped no more, without the collector"
    finally:
        gc.unfreeze()


def test_health_says_that_a_model_is_slow_on_this_processor(model: Path, tmp_path: Path) -> None:
    """Its graph was compiled for instructions that this one lacks, so that it is interpreted."""
    compiled = {"targets": ["eager", "aoti"], "march": "native", "instructions": ["of_another_processor"]}
    service = Service([ModelSpec(name="ctr", path=another_version(model, tmp_path / "v1", **compiled))])
    assert "this one lacks of_another_processor" in service.health()["models"][0]["warnings"][0]


def test_requests_are_shared_between_versions(model: Path, tmp_path: Path) -> None:
    old, new = another_version(model, tmp_path / "old"), another_version(model, tmp_path / "new")
    service = Service([ModelSpec.parse(f"ctr={old}"), ModelSpec.parse(f"ctr={new}@3")])
    body = json.dumps({"rows": [GOOD]}).encode()
    found = [service.score(body, JSON).version for _ in range(200)]
    assert 110 < found.count("new") < 190
    with pytest.raises(ValueError, match="NAME=PATH@SHARE"):
        ModelSpec.parse("ctr=x@no")
    with pytest.raises(ExportError, match="has no export"):
        Service([ModelSpec(name="x", path=tmp_path / "new" / "aoti")])
