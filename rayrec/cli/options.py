"""What several commands have in common: the checkpoint of a run that is read."""

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
