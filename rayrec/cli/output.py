"""What commands print on a terminal: tables, and a last line with the next command, ready to type.

Tables stay readable in a narrow terminal and in a pipe.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rayrec.data.tools.init.inspect import Inspection
    from rayrec.train.config.train_config import TrainConfig

_WIDEST = 10_000


def show(shown: Table, console: Console) -> None:
    """Prints a table, as wide as necessary if stdout is not a terminal."""
    if not console.is_terminal:
        wide = console.options.update(width=_WIDEST)
        console.width = max(console.width, console.measure(shown, options=wide).maximum)
    console.print(shown)


def show_columns(inspection: Inspection, *, to_stderr: bool) -> None:
    """Prints the proposed role of each column, with notes below the table."""
    from rich.console import Console

    from rayrec.data.tools.init.column_facts import plain_number
    from rayrec.train.terminal import plain, table

    console = Console(stderr=to_stderr, soft_wrap=True)
    files = f"{inspection.files:,} file{'' if inspection.files == 1 else 's'}"
    title = f"{inspection.rows:,} rows in {files}, {inspection.inspected_rows:,} inspected"
    columns = table("column", "type", "role", "nulls>", "ids>", "range", title=title)
    for c in inspection.columns:
        ids = f"{c.distinct:,}" if c.role.startswith(("id", "weighted")) else ""
        span = "" if c.low is None or c.high is None else f"{plain_number(c.low)} to {plain_number(c.high)}"
        role = f"{c.role} (--{c.stated})" if c.stated else c.role
        columns.add_row(plain(c.name), plain(c.kind), role, f"{c.nulls:,}" if c.nulls else "", ids, span)
    show(columns, console)
    notes = [f"{c.name}: {c.note}" for c in inspection.columns if c.note and c.role != "label"]
    for line in [*notes, *_label_lines(inspection)]:
        console.print(plain(line), highlight=False)


def _label_lines(inspection: Inspection) -> Iterator[str]:
    for label in inspection.labels:
        rule = " and ".join(f"{key} {value!r}" for key, value in label.schema.items() if key != "column")
        description = f"{label.column}{rule and f', {rule}'} ({label.why})"
        yield f"label: {description}; {label.positives.mean():.1%} of {len(label.positives):,} rows have 1"


def show_importance(parts: Sequence[Mapping[str, Any]]) -> None:
    """Prints permutation importance, the most important input first."""
    from rich.console import Console

    from rayrec.train.terminal import plain, table

    changes = table("input", "kind", "NE>", "AUC>", title="change when permuted")
    for row in parts:
        changes.add_row(plain(row["name"]), row["kind"], f"{row['ne']:+.4f}", f"{-row['auc']:+.4f}")
    show(changes, Console())


def next_is(*words: str) -> None:
    """Prints a command, quoted for the shell."""
    _say(f"next: {shlex.join(words)}")


def after_training(run: str, config: TrainConfig) -> None:
    """Suggests to evaluate, then to export the best checkpoint, or the newest if the run keeps no best one.

    Args:
        run: a path or a URI.
    """
    checkpoint = "newest" if config.storage.keep_best is None else "best"
    if config.data.eval is not None:
        _say(f"look: {shlex.join(['rayrec', 'evaluate', _short(run), *_checkpoint(checkpoint)])}")
    after_evaluation(run, checkpoint, config.model.name)


def after_evaluation(run: str, checkpoint: str, model: str | None) -> None:
    """Suggests to export the checkpoint that was scored, or to index it if the built-in model is a retriever."""
    from rayrec.models import RETRIEVERS

    command, folder = ("index", "indexes") if model in RETRIEVERS else ("export", "exports")
    next_is("rayrec", command, _short(run), _free(folder, _name(run)), *_checkpoint(checkpoint))


def after_tower(run: str, checkpoint: str, tower: str) -> None:
    """Suggests to index the items of a retriever with the query tower that was exported."""
    words = [_short(run), _free("indexes", _name(run)), *_checkpoint(checkpoint)]
    next_is("rayrec", "index", *words, "--tower", tower)


def _name(run: str) -> str:
    return Path(run.partition("?")[0]).name if "://" in run else Path(run).absolute().name


def _say(text: str) -> None:
    """Prints, and ignores a closed pipe or a full disk: the command has succeeded."""
    with suppress(OSError):
        typer.echo(text)


def _checkpoint(checkpoint: str) -> list[str]:
    return [] if checkpoint == "newest" else ["--checkpoint", checkpoint]


def _short(uri: str) -> str:
    """Relative to the working folder if it is inside."""
    if "://" in uri:
        return uri
    folder, path = Path.cwd(), Path(uri)
    return str(path.relative_to(folder) if path.is_absolute() and path.is_relative_to(folder) else path)


def _free(above: str, name: str) -> str:
    """A new folder name for an export or an index."""
    folders = (f"{above}/{name}{'' if number == 1 else f'-{number}'}" for number in range(1, 1000))
    return next(folder for folder in folders if not Path(folder).exists())


def tell(text: str, style: str | None = None) -> None:
    """Prints on stderr and ignores failures such as a closed pipe: the exit status still reports the result."""
    from rich.console import Console

    with suppress(Exception, SystemExit):
        Console(stderr=True).print(text, style=style, highlight=False, soft_wrap=True)


def report_error(error: Exception) -> int:
    """Prints an error on stderr; returns the exit status."""
    from rich.console import Console

    from rayrec._runtime.debug import debugging
    from rayrec.storage.secrets import without_secrets
    from rayrec.train.errors import Interrupted
    from rayrec.train.terminal import plain

    if debugging():
        with suppress(Exception, SystemExit):
            Console(stderr=True).print_exception()
    if isinstance(error, Interrupted):
        tell(plain(str(error)), style="yellow")
        return 128 + error.signal
    expected = isinstance(error, ValueError) and str(error)
    text = str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)"
    tell(f"[bold red]error:[/] {plain(without_secrets(text))}")
    return 1


@contextmanager
def errors_reported() -> Iterator[None]:
    """Reports an error of the body at once, and then ends the command: a context around this one may take a while to
    close."""
    try:
        yield
    except Exception as error:
        raise typer.Exit(report_error(error)) from error
