"""`rayrec tune`: tries values of fields of a config, and says which were best."""

from __future__ import annotations

from typing import Annotated

import typer

from rayrec.cli.options import Config, Overrides


def tune(
    config: Config,
    params: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="FIELD=SPACE",
            help="What to vary, e.g. optimizers.sparse.lr=log(0.001,0.1); SPACE is a list [a, b], uniform(low,high), "
            "log(low,high) or int(low,high); may be repeated.",
        ),
    ],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(min=1, help="How many draws.")] = 10,
    metric: Annotated[str, typer.Option(help="Figure of the evaluations that decides.")] = "auc",
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time; default: as many as the cluster carries.")
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            min=1, help="Evaluations that each trial gets before it may be stopped; default: a third, at least 2."
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--search", help="random, or optuna: draw near what was good (pip install rayrec[search]).")
    ] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    track: Annotated[str | None, typer.Option(help="mlflow, wandb or comet: send the figures there too.")] = None,
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
    found = tune(read, search, display=display)
    display.console.print(trials_table(found, metric))
    display.say(f"best config: {folder_of(read).partition('?')[0]}/best.yaml")
