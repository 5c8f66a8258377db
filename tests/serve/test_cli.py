"""What `rayrec serve` is given wrong is told before anything is started."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from rayrec.inference import ExportError
from rayrec.serve import ModelSpec
from rayrec.serve.on_ray import Settings, check, read_token


def test_a_token_file_must_hold_a_word(tmp_path: Path) -> None:
    for name, text in {"empty": "", "two": "a b", "odd": "gehe\u00efm"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"--token-file .*{name} must hold one word"):
            read_token(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(tmp_path / "none")
    (tmp_path / "good").write_text("s3cret\n")
    assert read_token(tmp_path / "good") == "s3cret"


@pytest.mark.parametrize("text", ["=exports", "a/b=exports", "a b=exports", "a=exports@0", "a=exports@x", "a=x@inf"])
def test_a_model_is_written_as_name_path_and_share(text: str) -> None:
    with pytest.raises(ValueError, match=r"name|NAME"):
        ModelSpec.parse(text)


def test_what_cannot_be_served_is_told_before_ray_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    good = ModelSpec(name="ctr", path=model)
    with pytest.raises(ExportError, match="holds no export"):
        check(Settings(models=(good, ModelSpec(name="b", path=tmp_path / "none"))))
    damaged = shutil.copytree(model, tmp_path / "damaged")
    (damaged / "tables.bin").write_bytes(b"\x01" + (damaged / "tables.bin").read_bytes()[1:])
    with pytest.raises(ExportError, match=r"tables\.bin is damaged"):
        check(Settings(models=(good, ModelSpec(name="b", path=damaged))))
    with pytest.raises(ValueError, match="--port 70000"):
        check(Settings(models=(good,), port=70_000))
    with pytest.raises(ValueError, match=r"--route ctr: give a name, and a route such as /ctr"):
        check(Settings(models=(good,), route="ctr"))
    with pytest.raises(ValueError, match="--cpus 4096"):
        check(Settings(models=(good,), cpus=4096))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"cannot listen on --host 127\.0\.0\.1 --port"):
            check(Settings(models=(good,), port=taken.getsockname()[1]))
        port = taken.getsockname()[1]
    check(Settings(models=(good,), port=port))
