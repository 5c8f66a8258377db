"""Drops errors in optional work: console output, records, reports and callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec

from rayrec.storage.secrets import without_secrets
from rayrec.train.terminal import notice

RECORD = "Could not write a log record"


class Tolerance:
    """Drops errors and reports the first one of each subject.

    Args:
        show: called with each report; by default a line on stderr, as the console itself may be what fails.
    """

    def __init__(self, show: Callable[[str], object] = notice) -> None:
        self._show = show
        self._reports: dict[str, str] = {}

    @property
    def reports(self) -> tuple[str, ...]:
        """All reports so far."""
        return tuple(self._reports.values())

    @contextmanager
    def drop_errors(self, subject: str = RECORD) -> Iterator[None]:
        """Drop an error of the body. KeyboardInterrupt and SystemExit pass, as they end the process.

        Args:
            subject: what has failed; the first words of the report.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            # rich raises SystemExit when stdout is a closed pipe.
            if isinstance(error, SystemExit) and not _is_closed_pipe(error):
                raise
            self.report(error, subject)

    def report(self, error: BaseException, subject: str = RECORD) -> None:
        """Report a dropped error."""
        if subject not in self._reports:
            self._reports[subject] = without_secrets(f"{subject} ({_reason(error)}). The run continues.")
            self._show(self._reports[subject])


def _is_closed_pipe(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


def _reason(error: BaseException) -> str:
    cause = error.__context__ if _is_closed_pipe(error) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


P = ParamSpec("P")


def tolerated(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorate a method so that `self.tolerance` drops its errors."""

    @functools.wraps(method)
    def guarded(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        with self.tolerance.drop_errors():
            method(self, *args, **kwargs)

    return guarded


def replace_unencodable(stream: Any) -> None:
    """Let a text stream write `?` for characters that it cannot encode."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        with suppress(Exception):
            stream.reconfigure(errors="replace")
