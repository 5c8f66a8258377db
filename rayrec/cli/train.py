"""`rayrec train`, `resume`, `stop`, `evaluate`, `plan`, `report`, `config`, `tune` and `ids`; `rayrec runs …` and
`rayrec checkpoint …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rayrec.cli.options import AllowCode, Config, Overrides, RunDir, WhichCheckpoint, path
from rayrec.cli.output import after_evaluation, after_training, errors_reported
from rayrec.cli.text_files import reads_text_files

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig

runs = typer.Typer(help="Look at runs, and compare them.", no_args_is_help=True)
checkpoints = typer.Typer(
    name="checkpoint", help="Verify, inspect, convert, copy and prune checkpoints.", no_args_is_help=True
)

Source = Annotated[
    str,
    typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder (its newest checkpoint) or checkpoint; path or URI."),
]


def train(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the same as --set name=NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run of this name is renamed.")] = False,
    root: Annotated[
        Path | None,
        typer.Option(parser=path, help="Base folder of relative paths in the config; default: the current folder."),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="In a Ray job: import a model.factory that was not submitted with it.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Add a tracker to trainer.trackers: mlflow, wandb or comet; may be repeated."),
    ] = None,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="End at once if the cluster has no room; short for trainer.wait_for_room_s=0."),
    ] = False,
) -> None:
    """Train a model, or resume the run of the same name."""
    import yaml

    from rayrec._runtime.imports import quick_imports
    from rayrec.train.driver.early_ray import begun_for

    short_forms = [
        *([f"name={name}"] if name is not None else []),
        *(["trainer.wait_for_room_s=0"] if no_wait else []),
    ]
    settings = [*(overrides or []), *short_forms]
    with begun_for(lambda: yaml.safe_load(config.read_text(encoding="utf-8")), settings), errors_reported():
        with quick_imports():
            from rayrec.train import load_config
        train_config = load_config(config, settings)
        _fit(train_config, track, fresh=fresh, root=root, allow_code=allow_code)


def _fit(train_config: TrainConfig, track: list[str] | None = None, **options: Any) -> None:
    from rayrec._runtime.imports import quick_imports

    with quick_imports():
        from rayrec.train import Trainer
        from rayrec.train.driver.trackers import with_trackers

    trainer = Trainer(with_trackers(train_config, track or []), **options)
    trainer.fit()
    after_training(trainer.folder.remote or str(trainer.folder.path), trainer.config)


def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="In a Ray job: import a model.factory that was not submitted with it.")
    ] = False,
) -> None:
    """Resume a run with the config in its folder, as the same `rayrec train` command would; a folder may have moved."""
    from rayrec.train.config.file import apply_override, parse_config
    from rayrec.train.driver.early_ray import begun_for
    from rayrec.train.errors import TrainError
    from rayrec.train.run.folder import RunFolder
    from rayrec.train.run.mirror import run_here, storage_and_name
    from rayrec.train.terminal import notice

    with run_here(run_dir, notice) as run:
        raw = RunFolder(run).read_given()
    if raw is None:
        raise TrainError(f"{run_dir} is not a run folder: it has no config.yaml; give <storage.path>/<name> of a run")
    storage, name = storage_and_name(run_dir)
    raw = {**raw, "name": name, "storage": {**raw.get("storage", {}), "path": storage}}
    for override in overrides or []:
        raw = apply_override(raw, override)
    with begun_for(lambda: raw, ()), errors_reported():
        _fit(parse_config(raw), allow_code=allow_code)


def stop(
    run_dir: RunDir,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for its end; 0: only ask it to stop.")
    ] = 300.0,
) -> None:
    """Ask a running run to save a last checkpoint and stop, from another terminal or machine."""
    from rayrec.checkpoint import CheckpointStore
    from rayrec.checkpoint.ownership import await_end, request_stop
    from rayrec.storage.locations import inside
    from rayrec.train.errors import TrainError
    from rayrec.train.run.mirror import holds

    if not holds(run_dir, "config.yaml", "checkpoints"):
        raise TrainError(f"{run_dir} is not a run folder: it has no config.yaml; give <storage.path>/<name> of a run")
    store = CheckpointStore(inside(run_dir, "checkpoints"))
    launch = request_stop(store.root)
    if launch is None:
        typer.echo(f"{run_dir} is not running; nothing was stopped.")
        return
    typer.echo(f"Asked {launch} to save a last checkpoint and stop.")
    if not wait_s:
        return
    try:
        ended = await_end(store.root, launch, wait_s)
    except TimeoutError as error:
        raise TrainError(
            f"{error.strerror}: it has died, or its storage is away. `rayrec resume {run_dir}` takes over the run"
        ) from error
    if not ended:
        raise TrainError(
            f"{launch} still runs after {wait_s:g} s. It looks for the request once its workers have resources, and "
            f"ends within its trainer.grace_s; wait longer (--wait), or see its output"
        )
    newest = store.latest()
    saved = "It has no checkpoint" if newest is None else f"Its newest checkpoint is of step {newest.step}"
    typer.echo(f"{run_dir} has ended. {saved}; `rayrec resume {run_dir}` continues it.")


@reads_text_files
def evaluate(
    run_dir: RunDir,
    data: Annotated[
        str | None, typer.Option(help="Parquet file, folder or glob; default: the run's data.eval.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers; 0: this process only.")] = 0,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
    importance: Annotated[
        bool,
        typer.Option("--importance", help="Also measure permutation importance, by table and by number."),
    ] = False,
) -> None:
    """Score a checkpoint of a run; writes evaluation.json there."""
    from rayrec.train.after.evaluate import evaluate_run
    from rayrec.train.config.difference import value_at
    from rayrec.train.run.folder import RunFolder
    from rayrec.train.run.mirror import run_here
    from rayrec.train.terminal import notice

    with run_here(run_dir, notice) as run:
        evaluate_run(run, data, workers, allow_code=allow_code, checkpoint=checkpoint)
        if importance:
            from rayrec.cli.output import show_importance
            from rayrec.train.after.importance import importance_of_run

            show_importance(importance_of_run(run, data, allow_code=allow_code, checkpoint=checkpoint))
        model = value_at(RunFolder(run).read_config(), "model.name")
    after_evaluation(run_dir, checkpoint, model)


def plan(
    config: Config,
    overrides: Overrides = None,
    world: Annotated[
        str | None,
        typer.Option(help="Workers, or HOSTSxWORKERS such as 16x8; compares several, such as 1x8,4x8."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Device of a worker: cpu, a100_80, h100, …")] = "cpu",
    load: Annotated[
        Path | None, typer.Option(parser=path, help="Evaluate this plan instead of searching for one.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--diff", parser=path, help="Show differences from this plan.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(parser=path, help="Write the plan to this file, for sharding.plan.")
    ] = None,
    html: Annotated[Path | None, typer.Option(parser=path, help="Write a picture of the plan to this file.")] = None,
) -> None:
    """Show how tables would be sharded, the bottleneck, and what would help; needs no cluster and no GPU."""
    from rayrec.train import load_config
    from rayrec.train.planning.plan_only import show_plan

    if world is not None and "," in world:
        from rayrec.train.planning.shapes import show_shapes

        if load or against or save or html:
            raise ValueError("--load, --diff, --save and --html need a single cluster in --world")
        show_shapes(load_config(config, overrides or []), world.split(","), gpu)
        return
    files = {"load": load, "against": against, "save": save, "html": html}
    show_plan(load_config(config, overrides or []), world, gpu, **files)


def report(run_dir: RunDir) -> None:
    """Write report.html of a run, also while it trains or after it failed."""
    from rayrec.train.report import write_report
    from rayrec.train.run.mirror import run_here
    from rayrec.train.terminal import notice

    with run_here(run_dir, notice) as run:
        typer.echo(write_report(run))


def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", parser=path, help="Show this config with all defaults."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """List all config fields (Markdown), or show a config with its defaults."""
    import yaml

    from rayrec.train import load_config
    from rayrec.train.config.reference import config_reference

    if file is None:
        typer.echo(config_reference())
    else:
        resolved = load_config(file, overrides or []).to_dict()
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)


def tune(
    config: Config,
    params: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="FIELD=SPACE",
            help="Field to vary, e.g. optimizers.sparse.lr=log(0.001,0.1); SPACE is a list [a, b], uniform(low,high), "
            "log(low,high) or int(low,high); may be repeated.",
        ),
    ],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of trials.")] = 10,
    metric: Annotated[str, typer.Option(help="Evaluation metric that decides.")] = "auc",
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Concurrent trials; default: as many as fit on the cluster.")
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluations before a trial may be stopped; default: a third, at least 2."),
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--search", help="random, or optuna: sample near good trials (pip install rayrec[search]).")
    ] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    track: Annotated[str | None, typer.Option(help="Also send metrics to mlflow, wandb or comet.")] = None,
) -> None:
    """Search for good values of fields; poor trials stop early, and the same command again resumes."""
    from rayrec.train import load_config
    from rayrec.train.driver.console import Display
    from rayrec.train.tune import Search, folder_of, tune
    from rayrec.train.tune.shown import trials_table

    search = Search(
        params=params,
        trials=trials,
        metric=metric,
        concurrent=concurrent,
        grace=grace,
        algorithm=algorithm,
        seed=seed,
        track=track,
    )
    read = load_config(config, overrides or [])
    display = Display()
    results = tune(read, search, display=display)
    display.console.print(trials_table(results, metric))
    display.say(f"best config: {folder_of(read).partition('?')[0]}/best.yaml")


def worth(
    config: Config,
    vary: Annotated[Path, typer.Option(parser=path, help="YAML file: names of variants with their changes.")],
    overrides: Overrides = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Read so many rows only; default: all.")] = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Folder of the result; default: STORAGE/NAME-worth.")
    ] = None,
) -> None:
    """Train variants of a model side by side in the order of time, and show their differences in NE."""
    from dataclasses import replace

    from rich.table import Table

    from rayrec.storage.locations import local_path
    from rayrec.train.config.file import apply_override, read_yaml
    from rayrec.train.driver.console import Display
    from rayrec.train.report.worth import COLUMNS, worth_rows
    from rayrec.train.run.paths import resolved
    from rayrec.train.worth import compare, variants_of

    raw, folder = read_yaml(config), config.expanduser().absolute().parent
    for override in overrides or []:
        raw = apply_override(raw, override)
    variants = [replace(one, config=resolved(one.config)) for one in variants_of(raw, read_yaml(vary), folder)]
    first, display = variants[0].config, Display()
    folder = out or local_path(f"{first.storage.path}/{first.name}-worth")
    figures = compare(variants, folder, rows=rows, on_progress=display.say)
    shown = Table(*COLUMNS)
    for cells in worth_rows(figures):
        shown.add_row(*cells)
    display.console.print(shown)
    display.say(f"report: {folder / 'worth.html'}")


def rewind(
    run_dir: RunDir,
    to: Annotated[str, typer.Option(metavar="TIME", help="Such as 2026-11-28T21:00; UTC without an offset.")],
) -> None:
    """Let a run that is not training resume from its newest checkpoint of a time, after it trained on wrong data."""
    from rayrec.train.after.rewind import parse_time, rewind_run

    try:
        time = parse_time(to)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--to") from None
    done = rewind_run(run_dir, time)
    if done.checkpoint is None:
        typer.echo(f"the newest checkpoint, of step {done.chosen.step}, is of that time already: {done.chosen.path}")
        return
    typer.echo(f"rewound from step {done.before.step} to step {done.chosen.step}: {done.checkpoint.path}")
    typer.echo("exports of later checkpoints are as they were: publish or export the run again")


class _ListsByDefault(TyperGroup):
    """`rayrec ids RUN` is `rayrec ids list RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["list", *args]
        return super().parse_args(ctx, args)


ids = typer.Typer(
    name="ids",
    cls=_ListsByDefault,
    help="Tables with dynamic ids: list the ids that have rows (rayrec ids RUN_DIR), and remove ids.",
    no_args_is_help=True,
)


@ids.command("list")
def list_ids(run_dir: RunDir, checkpoint: WhichCheckpoint = "newest") -> None:
    """List the ids that have rows in tables with dynamic ids, as CSV."""
    from rayrec.train.after.ids import ids_of_run

    rows = ids_of_run(run_dir, checkpoint)
    typer.echo("table,id,row,count,last_seen")
    for row in rows:
        typer.echo(f"{row.table},{row.id},{row.row},{row.count},{row.last_seen}")


@ids.command()
def forget(
    run_dir: RunDir,
    file: Annotated[Path, typer.Option("--ids", parser=path, metavar="FILE", help="Text file, an id in each line.")],
    table: Annotated[
        str | None, typer.Option(help="Table to remove them from; needed if the run has several with other ids.")
    ] = None,
) -> None:
    """Remove ids with their weights and optimizer state, in a new checkpoint of a run that is not training."""
    from rayrec.train.after.ids import forget as forget_ids

    done = forget_ids(run_dir, file, table)
    others = f"; {done.unknown:,} have no row" if done.unknown else ""
    typer.echo(f"removed {done.found:,} ids{others}: {done.checkpoint.path}")
    if done.earlier:
        typer.echo(f"still in {len(done.earlier)} earlier checkpoints (rayrec checkpoint prune {run_dir} --keep 1)")
    if done.found:
        typer.echo("exports and backups that were made before still have them: export again")


@runs.command("list")
def list_runs(
    folder: Annotated[str, typer.Argument(help="Folder of runs, their storage.path; a path or URI.")] = "runs",
) -> None:
    """List the runs in a folder with their last metrics, newest first."""
    from rayrec.train.driver.console import Display
    from rayrec.train.report.runs import find_runs, list_table

    found_runs = find_runs(folder)
    if not found_runs:
        typer.echo(f"no runs in {folder}")
        return
    Display().console.print(list_table(found_runs))


@runs.command()
def compare(
    run_dirs: Annotated[list[str], typer.Argument(metavar="RUN_DIR…", help="Two run folders or more; paths or URIs.")],
    html: Annotated[Path, typer.Option(parser=path, help="File for the page with the curves.")] = Path("compare.html"),
) -> None:
    """Show last metrics and differing config fields of runs, and write a page with their curves."""
    from rayrec.train.driver.console import Display
    from rayrec.train.report.run import read_run
    from rayrec.train.report.runs import compare_table, write_comparison
    from rayrec.train.run.mirror import run_here
    from rayrec.train.terminal import notice

    if len(run_dirs) < 2:
        raise typer.BadParameter("give two run folders or more")
    loaded = []
    for run_dir in run_dirs:
        with run_here(run_dir, notice) as run:
            loaded.append(read_run(run))
    display = Display()
    display.console.print(compare_table(loaded))
    write_comparison(loaded, html)
    display.say(f"curves side by side: {html}")


@checkpoints.command()
def verify(source: Source) -> None:
    """Read every byte of a checkpoint, or of all checkpoints of a run, and name damaged parts."""
    from rayrec.checkpoint.tools import verify as verify_checkpoints

    damaged = False
    for checked, damages in verify_checkpoints(source):
        typer.echo(f"{checked}: {'whole' if not damages else 'DAMAGED'}")
        for damage in damages:
            typer.echo(f"  {damage}")
        damaged = damaged or bool(damages)
    if damaged:
        raise typer.Exit(1)


@checkpoints.command()
def inspect(source: Source) -> None:
    """Show the contents of a checkpoint: step, tables, layers, sizes and id mappings."""
    from rayrec.checkpoint.tools import describe

    typer.echo("\n".join(describe(source)))


@checkpoints.command()
def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="FILE", parser=path, help="File to write.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also write optimizer state.")] = False,
) -> None:
    """Write a checkpoint's weights to a safetensors file, by the names of the unsharded model."""
    from rayrec.checkpoint.tools import convert as convert_checkpoint

    checkpoint, count, size = convert_checkpoint(source, out, optimizer)
    typer.echo(f"read the checkpoint of step {checkpoint.step}: {checkpoint.path}")
    typer.echo(f"{out}: {count} tensors, {size / 1e6:,.1f} MB")


@checkpoints.command()
def copy(
    source: Source,
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder that receives the checkpoint; path or URI.")],
) -> None:
    """Copy a checkpoint, or the newest one of a run, to a folder on any storage."""
    from rayrec.checkpoint.tools import copy as copy_checkpoint

    typer.echo(f"copied the checkpoint of step {(copied := copy_checkpoint(source, out)).step}: {copied.path}")


@checkpoints.command()
def prune(
    run_dir: RunDir,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
) -> None:
    """Remove the older checkpoints of a run that is not training; the best one by its storage.keep_best stays."""
    from rayrec.checkpoint.tools import prune as prune_checkpoints
    from rayrec.train.run.choice import best_metric
    from rayrec.train.run.folder import RunFolder
    from rayrec.train.run.mirror import holds, run_here
    from rayrec.train.terminal import notice

    config = None
    if holds(run_dir, "config.yaml"):
        with run_here(run_dir, notice) as run:
            config = RunFolder(run).read_config()
    removed = prune_checkpoints(run_dir, keep, best_metric(config), notice)
    for name in removed:
        typer.echo(f"removed {name}")
    if not removed:
        typer.echo(f"nothing to remove: {run_dir} has only its newest and best checkpoints")
