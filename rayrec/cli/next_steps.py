"""What each command prints last: the command that comes after it, as it is to be typed."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig


def next_is(*words: str) -> None:
    """Prints a command, its words quoted for the shell."""
    _say(f"next: {shlex.join(words)}")


def after_training(run: str, config: TrainConfig) -> None:
    """Evaluate, then export the best checkpoint, or the last one where none is kept as the best.

    Args:
        run: a path or a URI.
    """
    which = "newest" if config.storage.keep_best is None else "best"
    if config.data.eval is not None:
        _say(f"look: {shlex.join(['rayrec', 'evaluate', _short(run), *_checkpoint(which)])}")
    after_evaluation(run, which)


def after_evaluation(run: str, checkpoint: str) -> None:
    """Export the checkpoint that was scored."""
    name = Path(run.partition("?")[0]).name if "://" in run else Path(run).absolute().name
    next_is("rayrec", "export", _short(run), _free(name), *_checkpoint(checkpoint))


def _say(text: str) -> None:
    """A console that is gone (a closed pipe, a full disk) does not make a finished command a failed one."""
    with suppress(OSError):
        typer.echo(text)


def _checkpoint(which: str) -> list[str]:
    return [] if which == "newest" else ["--checkpoint", which]


def _short(place: str) -> str:
    """From the working folder, where it lies below it."""
    if "://" in place:
        return place
    here, path = Path.cwd(), Path(place)
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)


def _free(name: str) -> str:
    """A folder for an export that is not there yet."""
    numbers = (f"exports/{name}{'' if number == 1 else f'-{number}'}" for number in range(1, 1000))
    return next(place for place in numbers if not Path(place).exists())
