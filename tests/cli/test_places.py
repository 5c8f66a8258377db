"""Paths and URIs on the command line: a URI is refused before a command begins where it cannot be read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer

from rayrec.cli import app, run
from rayrec.cli.options import path
from rayrec.data import DataError
from rayrec.storage import local_path

URI = "s3://bucket/v1"


def commands(group: typer.Typer, name: str = "rayrec") -> Iterator[tuple[str, Callable[..., object]]]:
    for one in group.registered_commands:
        assert one.callback is not None
        yield f"{name} {one.name or one.callback.__name__}", one.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance, f"{name} {below.name}")


def test_every_path_of_every_command_refuses_uris() -> None:
    """`pathlib` makes `s3:/bucket` of one, a folder here."""
    found = dict(commands(app))
    assert len(found) > 15
    paths = [
        (f"{command} {name}", [getattr(given, "parser", None) for given in extras])
        for command, function in found.items()
        for name, hint in get_type_hints(function, include_extras=True).items()
        for hint, *extras in [get_args(hint) if get_origin(hint) is Annotated else (hint,)]
        if Path in (hint, *get_args(hint))
    ]
    assert {"rayrec export out", "rayrec data convert out", "rayrec train config"} <= {name for name, _ in paths}
    assert [name for name, parsers in paths if parsers != [path]] == []


@pytest.mark.parametrize(
    "args",
    [
        ["train", URI],
        ["train", "x.yaml", "--root", URI],
        ["tune", URI, "--param", "trainer.seed=[1]"],
        ["plan", "x.yaml", "--save", URI],
        ["export", "run", URI],
        ["checkpoint", "convert", "run", URI],
        ["runs", "compare", "a", "b", "--html", URI],
        ["data", "convert", "x.csv", URI],
        ["data", "vocabulary", "x", "--column", "c", "--out", URI],
        ["data", "inspect", "x", "--write-vocabularies", URI],
        ["serve", "x", "--token-file", URI],
    ],
)
def test_a_uri_is_refused_by_name_where_only_a_path_is_possible(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(args) in (1, 2)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "is a URI, and only a local path is possible here" in told and "s3:/" in told
    assert not list(tmp_path.iterdir())


def test_what_pathlib_has_made_of_a_uri_is_refused_too() -> None:
    for given in (URI, Path(URI), "gs://b", Path("abfs://c@a/x")):
        with pytest.raises(DataError, match="is a URI"):
            local_path(given)
    for given in ("out", "/a/b:c/d", "c:d", "./s3:x", Path("a=1/b")):
        assert local_path(given) == Path(given)
