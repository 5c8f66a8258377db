"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

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
