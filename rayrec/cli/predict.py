"""`rayrec predict`: a model's predictions for all rows of Parquet files."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rayrec.cli.options import AllowCode, WhichCheckpoint


def predict(
    place: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="An exported folder, a folder of exports, or a run; or its URI.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet file, folder or glob.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder for the predictions, or a URI; on a cluster, a shared one.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Ray workers, a CPU each; 0: this process alone.")] = 0,
    columns: Annotated[str | None, typer.Option(help="Columns to keep, as user,item; default: all.")] = None,
    bad_rows: Annotated[
        Literal["error", "skip"], typer.Option(help="error: end with the first; skip: null as its prediction.")
    ] = "error",
    bad_rows_limit: Annotated[int, typer.Option(min=0, help="With skip: more bad rows than this end the job.")] = 1000,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Score Parquet files: every row once, with its columns; the same command again resumes."""
    from rayrec.inference.predict import predict as score
    from rayrec.train.after.export import exported_run
    from rayrec.train.driver.terminal import notice
    from rayrec.train.run.mirror import holds, run_here

    if holds(place, "config.yaml"):
        with run_here(place, notice) as run:
            place = str(exported_run(run, allow_code, checkpoint, tell=typer.echo))
    elif checkpoint != "newest":
        raise typer.BadParameter(f"--checkpoint {checkpoint}: {place} is no run folder; an export has one checkpoint")
    kept = columns.split(",") if columns else None
    done = score(place, data, out, columns=kept, workers=workers, bad_rows=bad_rows, bad_rows_limit=bad_rows_limit)
    typer.echo(f"{out}: {done.rows:,} rows in {done.parts} files, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    for reason, count in done.skipped.items():
        typer.echo(f"{count:,} rows without prediction: {reason}")
