"""Tables that commands print where there is little room: names on one line, figures whole."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from rayrec.cli import app, run
from rayrec.cli.output import after_evaluation, after_tower, show
from rayrec.train.terminal import plan_table

NAME = "user_history_of_viewed_items"
SHARDS = [{"shard_offsets": [0, 0], "shard_sizes": [250_000_000, 128]}] * 5
SHARDING = {
    "sharding_type": "table_row_wise", "compute_kernel": "fused_uvm_caching", "ranks": [0, 1, 2, 6], "shards": SHARDS,
}  # fmt: skip


def narrow() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_in_a_terminal_of_80_columns() -> None:
    console = narrow()
    show(plan_table({"plan": {"model": {NAME: SHARDING}}}), console)
    text = text_of(console)
    assert f"│ {NAME} │" in text and "…" not in text and max(map(len, text.splitlines())) <= 80


def test_columns_in_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {NAME: [[1, 2], [3]] * 20, "price_of_the_last_order": [0.5, 1e9] * 20, "click": [0, 1] * 20}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    assert run(["data", "inspect", str(tmp_path)]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    text = "\n".join(line for line in text.splitlines() if line[:1] in "╭│├╰┏┃┡└┌")
    assert f"│ {NAME} " in text and "│ price_of_the_last_order " in text and "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def test_the_help_of_every_command_shows_words_in_square_brackets() -> None:
    """Rich markup takes `[list]` for a style and leaves it out."""
    bracketed = 0
    for words, command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "500", "TERMINAL_WIDTH": "500"}).output
        shown = re.sub(r"\s+", " ", shown)
        for described in (command, *command.params):
            texts = [getattr(described, name, None) or "" for name in ("help", "epilog", "metavar")]
            for text in (text.replace("\\[", "[") for text in texts):
                for word in re.findall(r"\S*\[[^]]*\]\S*", text):
                    bracketed += 1
                    assert word in shown, f"rayrec {' '.join(words)} --help does not show {word}"
    assert bracketed > 10


def test_the_next_command_after_an_evaluation_fits_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for model, command in (("dlrm", "export runs/a exports/a"), ("two_tower", "index runs/a indexes/a")):
        after_evaluation("runs/a", "best", model)
        assert capsys.readouterr().out == f"next: rayrec {command} --checkpoint best\n"
    after_evaluation("s3://b/runs/a?region=x", "newest", None)  # a model of the user's own
    assert capsys.readouterr().out == "next: rayrec export 's3://b/runs/a?region=x' exports/a\n"
    after_tower("runs/a", "best", "tower")  # what was exported is a retriever's query
    assert capsys.readouterr().out == "next: rayrec index runs/a indexes/a --checkpoint best --tower tower\n"
