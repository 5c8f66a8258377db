"""What a run should be told though nothing failed: one line each, with the figure and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.train.config.train_config import TrainConfig


def at_start(config: TrainConfig, rows: int, cores: float | None) -> list[str]:
    """What can be known before the first step.

    Args:
        rows: of the training files, before filters.
        cores: that this process may use; None where workers run elsewhere.
    """
    trainer, found = config.trainer, []
    if trainer.batch_size >= rows:
        found.append(_one_step(trainer.batch_size, rows))
    if cores is not None and trainer.least_workers > max(1.0, cores):
        found.append(
            f"{trainer.least_workers} workers share {cores:g} cores and wait for each other; "
            f"set trainer.num_workers to {int(max(1.0, cores))} or fewer"
        )
    return found


def at_end(config: TrainConfig, outcome: Mapping[str, Any]) -> list[str]:
    """What the outcome of a run shows; see `Loop._outcome`."""
    batch, train = config.trainer.batch_size, outcome["train"]
    found = []
    rows = train["samples"] // max(1, outcome["epochs"])
    if 0 < rows <= batch:
        found.append(_one_step(batch, rows))
    evaluation = outcome["eval"] or {}
    tasks = {f" of {name!r}": of for name, of in evaluation.get("tasks", {}).items()} or {"": evaluation}
    for name, figures in tasks.items():
        found += _of_label(name, figures)
    if not evaluation and train.get("ne") is None and train.get("loss") is not None and "rmse" not in train:
        found.append(f"all labels of the last logged steps are alike; {_CHECK_LABELS}")
    return found


def _of_label(name: str, figures: Mapping[str, Any]) -> list[str]:
    """About one label's last evaluation."""
    share, ne, r2 = (figures.get(key) for key in ("ctr", "ne", "r2"))
    if share in (0.0, 1.0):
        return [
            f"every label{name} in the {figures['samples']:,} evaluation rows is {share:g}, so that AUC and NE mean "
            f"nothing; {_CHECK_LABELS}"
        ]
    if ne is not None and ne > 1:
        return [
            f"the last evaluation{name} has NE {ne:.3f}: worse than predicting the share of positives for every row "
            f"(NE 1); {_LEARN_LESS}"
        ]
    if r2 is not None and r2 < 0:
        return [f"the last evaluation{name} has R² {r2:.3f}: worse than predicting the mean (R² 0); {_LEARN_LESS}"]
    return []


def _one_step(batch: int, rows: int) -> str:
    few = max(1, rows // 20)
    return f"an epoch is one step: trainer.batch_size={batch:,} and {rows:,} rows; try trainer.batch_size={few:,}"


_CHECK_LABELS = "look at the label's column and rule (`rayrec data check CONFIG` counts label 1)"
_LEARN_LESS = (
    "try fewer trainer.epochs or smaller learning rates (optimizers.dense.lr, optimizers.sparse.lr), and keep the best "
    "checkpoint (storage.keep_best)"
)
