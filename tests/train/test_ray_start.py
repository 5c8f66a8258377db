"""When a local Ray is started beside a command's imports: only where the config is certain to want one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.train.driver.ray_start import _wants_local_ray


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("name: a\n", [], True),
        ("trainer: {num_workers: 2}\n", [], True),
        ("trainer: {num_workers: 2}\n", ["trainer.num_workers=0"], False),
        ("trainer: {num_workers: 0}\n", ["trainer.num_workers=3", "trainer.epochs=2"], True),
        ("trainer: {num_workers: 0}\n", [], False),
        ("trainer: {num_workers: [1, 2]}\n", [], False),
        ("trainer: {num_workers: 2}\n", ["trainer={num_workers: 0}"], False),
        ("trainer: 7\n", [], False),
        ("- a list\n", [], False),
        ("{not: yaml", [], False),
    ],
)
def test_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, overrides: list[str], wanted: bool
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert _wants_local_ray(path, overrides) is wanted
    assert not _wants_local_ray(tmp_path / "none.yaml", overrides)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not _wants_local_ray(path, overrides)


def test_it_begins_before_torch_and_ray_are_imported() -> None:
    code = "import rayrec.train.driver.ray_start, sys; print(sorted({'torch', 'ray', 'fbgemm_gpu'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
