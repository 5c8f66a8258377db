"""What several commands have in common: labels, local paths, runs, and the checkpoint of a run that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def path(given: str | Path) -> Path:
    """A path of this machine, as a parser of options; a URI is refused before the command begins."""
    if isinstance(given, Path) or "://" not in given:
        return Path(given)
    from rayrec.data.storage.locations import local_path

    try:
        return local_path(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", parser=path, help="YAML file with the config; `rayrec config` lists its fields."),
]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run folder: <storage.path>/<name>, a path or a URI.")]

WhichCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="newest|best|STEP",
        help="Which checkpoint of the run: the newest, the best by storage.keep_best, or that of a step.",
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
