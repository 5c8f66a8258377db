"""Runs a command; what goes wrong becomes one clean message and an exit status: 1, 2 for usage, 130 for Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from rayrec.cli.app import app

DEBUG = "--debug"


def main() -> None:
    """The `rayrec` command."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    Args:
        args: what stands after `rayrec`; `--debug` anywhere (or RAYREC_DEBUG=1) shows tracebacks and Ray's messages.
    """
    if DEBUG in args:
        os.environ["RAYREC_DEBUG"] = "1"
    try:
        app(args=[arg for arg in args if arg != DEBUG], prog_name="rayrec")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception as error:
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    from rayrec.train.driver.console import debugging
    from rayrec.train.errors import Interrupted

    console = Console(stderr=True)
    if debugging():
        console.print_exception()
    if isinstance(error, Interrupted):
        console.print(escape(str(error)), style="yellow", highlight=False, soft_wrap=True)
        return 130
    own = isinstance(error, ValueError) and str(error)
    text = str(error) if own else f"{type(error).__name__}: {error} (--debug shows where)"
    console.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    return 1
