"""The console, the record of a run and its exports are extras: whatever goes wrong with them, the run goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

from rayrec.train.driver.terminal import notice


class Tolerance:
    """`with tolerance: …` drops any error of its body; the first one is reported on stderr, later ones are not.

    rich ends the process (SystemExit) where stdout is a closed pipe; that is dropped as well. Any other SystemExit and
    KeyboardInterrupt pass: they mean that the process is to end.
    """

    def __init__(self) -> None:
        self._reported = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None or not (isinstance(error, Exception) or _is_closed_pipe(error)):
            return False
        self.report(error)
        return True

    def report(self, error: BaseException) -> None:
        """Report a dropped error, if it is the first."""
        if self._reported:
            return
        self._reported = True
        cause = error.__context__ if _is_closed_pipe(error) else error
        what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        notice(f"output or a record was lost ({what}); the run goes on")


def _is_closed_pipe(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


P = ParamSpec("P")


def tolerated(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A method whose errors its object's `tolerance` drops."""

    @functools.wraps(method)
    def guarded(self: Any, *given: P.args, **named: P.kwargs) -> None:
        with self.tolerance:
            method(self, *given, **named)

    return guarded


def lenient(stream: Any) -> None:
    """Characters that a stream cannot encode are written as `?` from now on."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        with suppress(Exception):
            stream.reconfigure(errors="replace")
