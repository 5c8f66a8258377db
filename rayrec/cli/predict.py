"""`rayrec predict`: a model's predictions for all rows of Parquet files."""

from __future__ import annotations

from typing import Annotated

import typer

from rayrec.cli.options import WhichCheckpoint


def predict(
    place: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="An exported folder, or a run folder; a run may be a URI.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet file, folder or glob.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder for the predictions, or a URI; on a cluster, a shared one.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Ray workers, a CPU each; 0: this process alone.")] = 0,
    columns: Annotated[str | None, typer.Option(help="Columns to keep, as user,item; default: all.")] = None,
    bad_rows: Annotated[str, typer.Option(help="error: end with the first; skip: null as its prediction.")] = "error",
    bad_rows_limit: Annotated[int, typer.Option(min=0, help="With skip: more bad rows than this end the job.")] = 1000,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Import the model.factory that the run folder names.")
    ] = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Score Parquet files: every row once, its columns kept; the same command again goes on where it stopped."""
    from rayrec.inference.predict import predict as run_predict
    from rayrec.train.after.export import exported_run
    from rayrec.train.driver.terminal import notice
    from rayrec.train.run.mirror import run_here

    if bad_rows not in ("error", "skip"):
        raise typer.BadParameter(f"--bad-rows {bad_rows}: error or skip")
    with run_here(place, notice) as model:
        if (model / "config.yaml").exists():
            model = exported_run(model, allow_code, checkpoint, tell=typer.echo)
        elif checkpoint != "newest":
            raise typer.BadParameter(
                f"--checkpoint {checkpoint}: {place} is no run folder; an export has one checkpoint"
            )
    done = run_predict(
        model,
        data,
        out,
        columns=None if columns is None else columns.split(","),
        workers=workers,
        bad_rows="skip" if bad_rows == "skip" else "error",
        bad_rows_limit=bad_rows_limit,
        say=typer.echo,
    )
    typer.echo(f"{out}: {done.rows:,} rows in {done.parts} files, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    for reason, count in done.skipped.items():
        typer.echo(f"{count:,} rows without prediction: {reason}")
