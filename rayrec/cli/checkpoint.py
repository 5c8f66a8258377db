"""`rayrec checkpoint …`: is it whole, what is in it, and how other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.options import path

app = typer.Typer(name="checkpoint", help="Verify, inspect and convert checkpoints.", no_args_is_help=True)

Place = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT", help="A run folder (its newest checkpoint), or a checkpoint; a path or URI."
    ),
]


@app.command()
def verify(place: Place) -> None:
    """Read every byte of a checkpoint (of a run: of all its checkpoints), and name what is damaged."""
    from rayrec.checkpoint.tools import verify as verify_checkpoints

    damaged = False
    for checked, damages in verify_checkpoints(place):
        typer.echo(f"{checked}: {'whole' if not damages else 'DAMAGED'}")
        for damage in damages:
            typer.echo(f"  {damage}")
        damaged = damaged or bool(damages)
    if damaged:
        raise typer.Exit(1)


@app.command()
def inspect(place: Place) -> None:
    """Show what a checkpoint holds: step, tables and layers with their sizes, and how ids are mapped."""
    from rayrec.checkpoint.tools import describe

    typer.echo("\n".join(describe(place)))


@app.command()
def convert(
    place: Place,
    out: Annotated[Path, typer.Argument(metavar="FILE", parser=path, help="The file to write.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also what optimizers keep.")] = False,
) -> None:
    """Write a checkpoint's weights, under the names of the unsharded model, to one safetensors file."""
    from rayrec.checkpoint.tools import convert as convert_checkpoint

    checkpoint, count, size = convert_checkpoint(place, out, optimizer)
    typer.echo(f"read the checkpoint of step {checkpoint.step}: {checkpoint.path}")
    typer.echo(f"{out}: {count} tensors, {size / 1e6:,.1f} MB")
