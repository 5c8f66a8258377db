"""A small run and its export, for tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.train import export_run
from tests.inference.runs import train


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "model").folder
