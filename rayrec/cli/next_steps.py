"""The last line of each command: the next command, ready to type."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig


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
    after_evaluation(run, checkpoint)


def after_evaluation(run: str, checkpoint: str) -> None:
    """Suggests to export the checkpoint that was scored."""
    name = Path(run.partition("?")[0]).name if "://" in run else Path(run).absolute().name
    next_is("rayrec", "export", _short(run), _free(name), *_checkpoint(checkpoint))


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


def _free(name: str) -> str:
    """A new folder name for an export."""
    folders = (f"exports/{name}{'' if number == 1 else f'-{number}'}" for number in range(1, 1000))
    return next(folder for folder in folders if not Path(folder).exists())
