"""`rayrec export`: a run to a folder that scores without training code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.next_steps import next_is
from rayrec.cli.options import AllowCode, WhichCheckpoint, path

FORMATS = "fp32, fp16, int8, int4, or AUTO: each table's is chosen by the loss of quality that was measured for it."


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder, or a checkpoint of one; a path or a URI.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", parser=path, help="Folder to write; must not exist.")],
    tables: Annotated[str, typer.Option(help=FORMATS)] = "fp32",
    dense: Annotated[str, typer.Option(help="Number format of the dense layers: fp32 or bf16.")] = "fp32",
    target: Annotated[
        str,
        typer.Option(help="eager: data alone, or aoti: also native code, for --march (half a minute, g++)."),
    ] = "eager",
    march: Annotated[
        str | None,
        typer.Option(help="With aoti: x86-64-v3 (default on x86), or native for this processor's own instructions."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="With AUTO: the tables' bytes as a share of fp32, e.g. 0.2.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Rows to compare scores on; default: the run's data.eval.")] = None,
    parity: Annotated[
        str, typer.Option(metavar="ROWS|all", help="Evaluation rows to compare scores on, drawn from all of them.")
    ] = "100000",
    force: Annotated[bool, typer.Option("--force", help="Keep an export that is outside its limits, or slow.")] = False,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Export a trained model, and compare its scores with those of the trainer: parity.html in the folder."""
    from rayrec._runtime.imports import quick_imports

    with quick_imports():
        from rayrec.inference import ExportOptions
        from rayrec.train.after.export import export_run
        from rayrec.train.driver.terminal import notice
        from rayrec.train.run.mirror import run_here

    if parity != "all" and not parity.isdecimal():
        raise typer.BadParameter(f"{parity!r} is neither a number of rows nor all", param_hint="--parity")
    rows = None if parity == "all" else int(parity)
    wanted = ExportOptions(
        tables=tables, dense=dense, target=target, march=march, budget=budget, parity=rows, force=force
    )
    with run_here(source, notice) as run:
        made = export_run(run, out, wanted, data, allow_code=allow_code, checkpoint=checkpoint)
    typer.echo(f"read the checkpoint of step {made.index.origin['step']}: {made.index.origin['checkpoint']}")
    found = made.parity
    typer.echo(
        f"{made.folder}: {made.index.version}, {found.bytes['tables']:,} bytes of tables "
        f"({found.bytes['tables'] / found.bytes['fp32']:.0%} of fp32)"
    )
    drawn = " drawn from all" if found.sampled else ""
    figures = [f"{name} {a or 0:.6f} as trained, {b or 0:.6f} exported" for name, a, b, _ in found.compared()]
    typer.echo(
        f"parity on {found.rows:,} rows{drawn}: logits differ by at most {found.logit_max:.2g}, {'; '.join(figures)}"
    )
    if found.slow is not None:
        typer.echo(found.slow)
    for problem in found.problems:
        typer.echo(f"outside its limits: {problem}")
    next_is("rayrec", "serve", str(out))
