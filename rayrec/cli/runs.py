"""`rayrec runs …`: what has been trained, and how runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.options import path

app = typer.Typer(help="Look at runs, and compare them.", no_args_is_help=True)


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(parser=path, help="Folder of runs, their storage.path.")] = Path("runs"),
) -> None:
    """List the runs in a folder with their last figures, newest first."""
    from rayrec.train.driver.console import Display
    from rayrec.train.run.runs import find_runs, list_table

    found = find_runs(folder)
    if not found:
        typer.echo(f"no runs in {folder}")
        return
    Display().console.print(list_table(found))


@app.command()
def compare(
    run_dirs: Annotated[list[str], typer.Argument(metavar="RUN_DIR…", help="Two run folders or more; paths or URIs.")],
    html: Annotated[Path, typer.Option(parser=path, help="Where the page with the curves goes.")] = Path(
        "compare.html"
    ),
) -> None:
    """Show last figures and differing config fields of runs, and write their curves side by side as one page."""
    from rayrec.train.driver.console import Display
    from rayrec.train.driver.terminal import notice
    from rayrec.train.report.run import read_run
    from rayrec.train.run.mirror import run_here
    from rayrec.train.run.runs import compare_table, write_comparison

    if len(run_dirs) < 2:
        raise typer.BadParameter("give two run folders or more")
    runs = []
    for place in run_dirs:
        with run_here(place, notice) as run:
            runs.append(read_run(run))
    display = Display()
    display.console.print(compare_table(runs))
    write_comparison(runs, html)
    display.say(f"curves side by side: {html}")
