"""Which version answers: sticky shares, and rollback."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from rayrec.cli import run
from rayrec.serve import JSON, App, ModelSpec, Service
from rayrec.serve.routing import by_share, unit_hash
from tests.serve.server import GOOD, Server
from tests.serve.test_service import version_of

BODY = json.dumps({"rows": [GOOD]}).encode()


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v1, v2 and v3, of which v2 and v3 score differently."""
    root = tmp_path_factory.mktemp("models")
    for number in (1, 2, 3):
        version_of(model, root / f"v{number}", number / 2)
    return root


def shares(versions: Path) -> tuple[ModelSpec, ModelSpec]:
    return (
        ModelSpec(name="ctr", path=versions / "v1", share=3.0),
        ModelSpec(name="ctr", path=versions, version="v2", share=1.0),
    )


def test_one_key_has_one_version_in_every_process_and_keys_are_shared_out(versions: Path) -> None:
    service = Service(shares(versions))
    servers = [Server(App(service)), Server(App(Service(shares(versions))))]
    found: Counter[str] = Counter()
    try:
        for number in range(60):
            key = f"user {number}"
            answers = {s.ask("POST", "/score", BODY, x_routing_key=key)[1]["version"] for s in servers for _ in "ab"}
            assert len(answers) == 1, key
            found.update(answers)
        without = {servers[0].ask("POST", "/score", BODY)[1]["version"] for _ in range(60)}
    finally:
        for server in servers:
            server.close()
    assert 5 <= found["v2"] <= 25 and found["v1"] + found["v2"] == 60
    assert without == {"v1", "v2"}


def test_shares_are_kept_and_another_share_moves_only_what_it_must() -> None:
    places = [unit_hash(f"ctr {number}") for number in range(20_000)]
    now = [by_share([(3.0, "a"), (1.0, "b")], place) for place in places]
    assert 0.23 < now.count("b") / len(now) < 0.27
    more = [by_share([(2.0, "a"), (2.0, "b")], place) for place in places]
    assert all(after == "b" for before, after in zip(now, more, strict=True) if before == "b")
    assert by_share([(1.0, "a")], 1 - 2**-56) == "a"


def series(service: Service, name: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in service.metrics().decode().splitlines() if line.startswith(name + "{"))
    return {labels: float(value) for labels, _, value in lines}


def test_one_command_goes_back_and_leaves_a_line(
    versions: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service([ModelSpec(name="ctr", path=versions)])
    caplog.set_level(logging.INFO, "rayrec.serve.audit")
    assert service.score(BODY, JSON).version == "v3"
    assert run(["service", "rollback", str(versions)]) == 0
    assert "v2 instead of v3" in capsys.readouterr().out
    assert service.refresh() == 1 and service.score(BODY, JSON).version == "v2"
    assert run(["service", "rollback", str(versions), "--to", "v3"]) == 0
    assert service.refresh() == 1 and service.score(BODY, JSON).version == "v3"
    lines = [json.loads(line) for line in (versions / "audit.jsonl").read_text().splitlines()]
    assert [(line["from"], line["to"]) for line in lines] == [("v3", "v2"), ("v2", "v3")]
    assert all(line["user"] and line["time"] for line in lines)
    told = [json.loads(record.message) for record in caplog.records if record.name == "rayrec.serve.audit"]
    assert [(line["outcome"], line["version"]) for line in told] == [("loaded", "v2"), ("loaded", "v3")]
    assert run(["service", "rollback", str(versions), "--to", "v9"]) == 1
    assert run(["service", "rollback", str(versions), "--to", "v1"]) == 0
    assert run(["service", "rollback", str(versions)]) == 1
    assert "no version older than v1" in capsys.readouterr().err
