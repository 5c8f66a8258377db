"""All commands. Packages are imported when a command runs, so that `--help` answers at once."""

from __future__ import annotations

import typer

from rayrec.cli import data, serve, train

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
app.add_typer(serve.service, name="service")
for command in (
    *(data.init, serve.export, serve.predict, serve.index, serve.retrieve, serve.serve, train.tune),
    *(train.train, train.evaluate, train.plan, train.report, train.config),
):
    app.command()(command)
