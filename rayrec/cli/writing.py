"""Output files of a command, and errors in writing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
