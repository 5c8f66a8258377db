"""What several commands have in common: options and arguments, paths of this machine, and output files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def path(given: str | Path) -> Path:
    """A path of this machine, as a parser of options; a URI is refused before the command begins."""
    if isinstance(given, Path) or "://" not in given:
        return Path(given)
    from rayrec.storage.locations import local_path

    try:
        return local_path(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """
    Raises:
        ValueError: names the option and the path, where the file or its folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; name a file that can be") from error


Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", parser=path, help="YAML file with the config; `rayrec config` lists its fields."),
]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run folder: <storage.path>/<name>, a path or a URI.")]

WhichCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="newest|whole|best|STEP",
        help="Which checkpoint of the run: the newest, the newest without damage, the best by storage.keep_best, or a "
        "step's.",
    ),
]

Label = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN[=VALUE]|COLUMN>=NUMBER",
        help="What is predicted: a column of 0 and 1, a value that counts as 1, or the numbers that do. "
        "Default: a column that looks like it.",
    ),
]

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, e.g. trainer.num_workers=4; may be repeated."),
]

AllowCode = Annotated[bool, typer.Option("--allow-code", help="Import the model.factory that the run folder names.")]

Paths = Annotated[list[str], typer.Argument(help="Parquet files, folders or globs, local or URIs.")]

Filters = Annotated[
    str, typer.Option(help="Only rows that pass, as data.train.filters: '[[day, \">=\", 2024-01-01]]'.")
]
