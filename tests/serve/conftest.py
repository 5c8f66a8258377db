"""A trained and exported model with every kind of mapping, and a service of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from rayrec.serve import App, Limits, ModelSpec, Service
from rayrec.train import export_run
from tests.inference.runs import train
from tests.serve.server import Server
from tests.train import small


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    small.write_all(root, rows=300)
    (root / "cities.txt").write_text("city 1\ncity 3\ncity 5\n")
    vocabulary = {"kind": "vocabulary", "path": str(root / "cities.txt"), "oov_rows": 1}
    sparse = [*small.RAW["schema"]["sparse"], {"name": "place", "column": "city", "mapping": vocabulary}]
    tables = [*small.RAW["tables"], {"name": "city", "rows": 4, "dim": 8, "features": ["place"]}]
    return train(root, schema__sparse=sparse, tables=tables)


@pytest.fixture(scope="session")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "model").folder


@pytest.fixture(scope="session")
def service(model: Path) -> Service:
    return Service([ModelSpec(name="ctr", path=model)], limits=Limits(body_bytes=1 << 20, rows=500, ids=5000))


@pytest.fixture(scope="session")
def server(service: Service) -> Iterator[Server]:
    made = Server(App(service))
    yield made
    made.close()
