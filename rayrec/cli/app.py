"""All commands, and how they are run.

Packages are imported when a command runs, so that `--help` answers at once. An error becomes one message and an exit
status: 1, or 2 for usage, 130 for Ctrl-C, 143 for SIGTERM, 129 for a closed terminal.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import typer

from rayrec._runtime.stop_signals import STOP_SIGNALS
from rayrec.cli import data, serve, train
from rayrec.cli.options import OnceCommand
from rayrec.cli.output import report_error, tell

DEBUG = "--debug"

app = typer.Typer(
    name="rayrec",
    help="Train recommendation models with embedding tables too large for one GPU, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="--debug with any command (or RAYREC_DEBUG=1) shows tracebacks and Ray's own messages.",
)

app.add_typer(data.data, name="data")
app.add_typer(train.runs, name="runs")
app.add_typer(train.checkpoints, name="checkpoint")
app.add_typer(train.ids, name="ids")
app.add_typer(serve.service, name="service")
for command in (
    *(data.init, serve.export, serve.publish, serve.predict, serve.index, serve.retrieve, serve.serve, train.tune),
    *(train.worth, train.train, train.resume, train.stop, train.rewind, train.evaluate, train.plan, train.report),
    train.config,
):
    app.command()(command)
for group in (app, data.data, train.runs, train.checkpoints, train.ids, serve.service):
    for info in group.registered_commands:
        info.cls = OnceCommand


def main() -> None:
    """The `rayrec` command."""
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        # A closed pipe or a full disk. Python would flush again at exit, fail, and change the status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Without this, Python searches all modules for garbage at exit: half a second with torch.
    gc.freeze()
    sys.exit(status)


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    Args:
        args: the words after `rayrec`. `--debug` anywhere (or RAYREC_DEBUG=1) shows tracebacks and Ray's messages.
    """
    if DEBUG in args:
        os.environ["RAYREC_DEBUG"] = "1"
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, _end) for number in STOP_SIGNALS} if main_thread else {}
    try:
        app(args=[arg for arg in args if arg != DEBUG], prog_name="rayrec")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception as error:
        return report_error(error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Ends the command at a stop signal. A run installs its own handler while it trains."""
    tell("interrupted", style="yellow")
    raise SystemExit(128 + number)
