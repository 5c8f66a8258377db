"""What each command prints last: the command that comes after it, as it is to be typed."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rayrec.train import TrainConfig


def next_is(*words: str) -> None:
    """Prints a command, its words quoted for the shell."""
    _say(f"next: {shlex.join(words)}")


def after_training(run: Path, config: TrainConfig) -> None:
    """Evaluate, then export the best checkpoint, or the last one where none is kept as the best."""
    which = "newest" if config.storage.keep_best is None else "best"
    place = _short(run)
    if config.data.eval is not None:
        _say(f"look: {shlex.join(['rayrec', 'evaluate', place, *_checkpoint(which)])}")
    next_is("rayrec", "export", place, _free(run.name), *_checkpoint(which))


def after_evaluation(run: Path, checkpoint: str) -> None:
    """Export the checkpoint that was scored."""
    next_is("rayrec", "export", _short(run), _free(run.name), *_checkpoint(checkpoint))


def _say(text: str) -> None:
    """A console that is gone (a closed pipe, a full disk) does not make a finished command a failed one."""
    with suppress(OSError):
        typer.echo(text)


def _checkpoint(which: str) -> list[str]:
    return [] if which == "newest" else ["--checkpoint", which]


def _short(path: Path) -> str:
    """From the working folder, where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)


def _free(name: str) -> str:
    """A folder for an export that is not there yet."""
    numbers = (f"exports/{name}{'' if number == 1 else f'-{number}'}" for number in range(1, 1000))
    return next(place for place in numbers if not Path(place).exists())
