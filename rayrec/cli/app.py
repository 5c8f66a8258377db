"""The commands and their options. Packages are imported when a command runs, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.checkpoint import app as checkpoint
from rayrec.cli.data import app as data
from rayrec.cli.export import export
from rayrec.cli.init import init
from rayrec.cli.next_steps import after_evaluation, after_training
from rayrec.cli.options import AllowCode, Config, Overrides, RunDir, WhichCheckpoint, path
from rayrec.cli.predict import predict
from rayrec.cli.retrieve import index, retrieve
from rayrec.cli.runs import app as runs
from rayrec.cli.serve import serve, service
from rayrec.cli.tune import tune

app = typer.Typer(
    name="rayrec",
    help="Train recommendation models whose embedding tables outgrow one GPU, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="--debug with any command (or RAYREC_DEBUG=1) shows tracebacks and Ray's own messages.",
)

app.add_typer(data, name="data")
app.add_typer(runs, name="runs")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(service, name="service")
app.command()(init)
app.command()(export)
app.command()(predict)
app.command()(index)
app.command()(retrieve)
app.command()(serve)
app.command()(tune)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the same as --set name=NAME.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; keep an earlier run of this name under another name.")
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(parser=path, help="Folder that relative paths of the config start from; default: this one."),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="In a Ray job: import a model.factory that was not submitted with it.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="mlflow, wandb or comet: send the figures there too; may be repeated."),
    ] = None,
) -> None:
    """Train a model, or resume the run of the same name."""
    from importlib import import_module

    from rayrec._runtime.imports import quick_imports

    with quick_imports():
        from rayrec.train import load_config
        from rayrec.train.driver.cluster import connected_for

    train_config = load_config(config, [*(overrides or []), *([f"name={name}"] if name is not None else [])])
    with connected_for(train_config, lambda: import_module("rayrec.train.trainer")):
        from rayrec.train import Trainer
        from rayrec.train.driver.trackers import tracker

        callbacks = [tracker(name, "rayrec") for name in track or []]
        trainer = Trainer(train_config, fresh=fresh, root=root, allow_code=allow_code, callbacks=callbacks)
        trainer.fit()
    after_training(trainer.folder.remote or str(trainer.folder.path), trainer.config)


@app.command()
def evaluate(
    run_dir: RunDir,
    data: Annotated[
        str | None, typer.Option(help="Parquet file, folder or glob; default: the run's data.eval.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers to use; 0: this process alone.")] = 0,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
    importance: Annotated[
        bool,
        typer.Option("--importance", help="Also measure permutation importance, by table and by number."),
    ] = False,
) -> None:
    """Score a checkpoint of a run; writes evaluation.json there."""
    from rayrec.train.after.evaluate import evaluate_run
    from rayrec.train.driver.terminal import notice
    from rayrec.train.run.mirror import run_here

    with run_here(run_dir, notice) as run:
        evaluate_run(run, data, workers, allow_code=allow_code, checkpoint=checkpoint)
        if importance:
            from rayrec.cli.tables import show_importance
            from rayrec.train.after.importance import importance_of_run

            show_importance(importance_of_run(run, data, allow_code=allow_code, checkpoint=checkpoint))
    after_evaluation(run_dir, checkpoint)


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    world: Annotated[
        str | None,
        typer.Option(help="Workers, or HOSTSxWORKERS as 16x8; several, as 1x8,4x8, are compared."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="What a worker has: cpu, a100_80, h100, …")] = "cpu",
    load: Annotated[
        Path | None, typer.Option(parser=path, help="Judge this plan instead of searching for one.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--diff", parser=path, help="Show what differs from this plan.")
    ] = None,
    save: Annotated[Path | None, typer.Option(parser=path, help="Write the plan here, for sharding.plan.")] = None,
    html: Annotated[Path | None, typer.Option(parser=path, help="Write a picture of the plan here.")] = None,
) -> None:
    """Show how tables would be sharded, what limits the plan and what would help; needs no cluster and no GPU."""
    from rayrec.train import load_config
    from rayrec.train.planning.plan_only import show_plan

    if world is not None and "," in world:
        from rayrec.train.planning.shapes import show_shapes

        if load or against or save or html:
            raise ValueError("--load, --diff, --save and --html are for one cluster: give --world only one")
        show_shapes(load_config(config, overrides or []), world.split(","), gpu)
        return
    files = {"load": load, "against": against, "save": save, "html": html}
    show_plan(load_config(config, overrides or []), world, gpu, **files)


@app.command()
def report(run_dir: RunDir) -> None:
    """Write report.html of a run, also while it trains or after it failed."""
    from rayrec.train.driver.terminal import notice
    from rayrec.train.report import write_report
    from rayrec.train.run.mirror import run_here

    with run_here(run_dir, notice) as run:
        typer.echo(write_report(run))


@app.command()
def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", parser=path, help="Show this config with all defaults, not the list."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """List the fields of a config (Markdown), or show a config as it would be used."""
    import yaml

    from rayrec.train import load_config
    from rayrec.train.config.reference import config_reference

    if file is None:
        typer.echo(config_reference())
    else:
        resolved = load_config(file, overrides or []).to_dict()
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)
