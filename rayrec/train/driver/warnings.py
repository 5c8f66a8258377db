"""Warnings about a run that has not failed: one line each, with the suspicious number and the setting to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayrec.train.config.train_config import TrainConfig


def at_start(config: TrainConfig, rows: int, cores: float | None) -> list[str]:
    """Warnings before the first step.

    Args:
        rows: number of rows of the training files, before filters.
        cores: number of cores that this process may use; None if workers run on other machines.
    """
    trainer, warnings = config.trainer, []
    if trainer.batch_size >= rows and config.data.follow is None:
        warnings.append(_one_step(trainer.batch_size, rows))
    if cores is not None and trainer.least_workers > max(1.0, cores):
        warnings.append(
            f"{trainer.least_workers} workers share {cores:g} cores and wait for each other; "
            f"set trainer.num_workers to {int(max(1.0, cores))} or fewer"
        )
    return warnings


def at_end(config: TrainConfig, outcome: Mapping[str, Any]) -> list[str]:
    """Warnings about the outcome of a run.

    Args:
        outcome: the result that rank 0 reported.
    """
    batch, train = config.trainer.batch_size, outcome["train"]
    warnings = []
    rows = train["samples"] // max(1, outcome["epochs"])
    if 0 < rows <= batch and config.data.follow is None:
        warnings.append(_one_step(batch, rows))
    evaluation = outcome["eval"] or {}
    warnings += of_evaluation(evaluation)
    if not evaluation and train.get("ne") is None and train.get("loss") is not None and "rmse" not in train:
        warnings.append(f"all labels of the last logged steps are the same; {_CHECK_LABELS}")
    return warnings


def of_evaluation(evaluation: Mapping[str, Any]) -> list[str]:
    """Warnings about the metrics of an evaluation; several labels have theirs in `tasks`."""
    by_task = evaluation.get("tasks", {}).items()
    labels = {f" of {task!r}": metrics for task, metrics in by_task} or {"": evaluation}
    return [text for name, metrics in labels.items() for text in _of_label(name, metrics)]


def _of_label(name: str, metrics: Mapping[str, Any]) -> list[str]:
    """Warnings about the evaluation of one label."""
    if "mrr" in metrics:
        return _of_ranking(metrics)
    share, ne, r2 = (metrics.get(key) for key in ("ctr", "ne", "r2"))
    if share in (0.0, 1.0):
        return [
            f"every label{name} in the {metrics['samples']:,} evaluation rows is {share:g}, so AUC and NE mean "
            f"nothing; {_CHECK_LABELS}"
        ]
    warnings = []
    if share is not None and (rarer := round(min(share, 1 - share) * metrics["samples"])) < _FEW_OF_A_LABEL:
        # The standard deviation of the AUC of random scores, with n of the rarer label and many others, is √(1 / 12n).
        error = 2 / math.sqrt(12 * max(1, rarer))
        warnings.append(
            f"about {rarer} of the {metrics['samples']:,} evaluation rows have label{name} {int(share <= 0.5)}, so "
            f"that the AUC may be off by {min(error, 0.5):.2f}; evaluate on more rows (data.eval, or --data)"
        )
    if ne is not None and ne > 1:
        warnings.append(
            f"the last evaluation{name} has NE {ne:.3f}: worse than predicting the share of positives for every row "
            f"(NE 1); {_LEARN_LESS}"
        )
    if r2 is not None and r2 < 0:
        warnings.append(
            f"the last evaluation{name} has R² {r2:.3f}: worse than predicting the mean (R² 0); {_LEARN_LESS}"
        )
    return warnings


def _of_ranking(metrics: Mapping[str, Any]) -> list[str]:
    """A warning where the ranking by a retriever cannot miss."""
    items = metrics.get("num_items")
    if items is None or items > _SHORTEST_CUTOFF:
        return []
    return [
        f"HR@{_SHORTEST_CUTOFF} is 1 for any model: there are only {items} items to rank; compare models by NDCG@10 or "
        "MRR, or train on data with more items"
    ]


def _one_step(batch: int, rows: int) -> str:
    smaller = max(1, rows // 20)
    return (
        f"an epoch is a single step: trainer.batch_size={batch:,} and only {rows:,} rows; "
        f"try trainer.batch_size={smaller:,}"
    )


_FEW_OF_A_LABEL = 100
_SHORTEST_CUTOFF = 10  # of the HR@k that consoles and reports show
_CHECK_LABELS = "check the label's column and rule (`rayrec data check CONFIG` counts label 1)"
_LEARN_LESS = (
    "try fewer trainer.epochs or smaller learning rates (optimizers.dense.lr, optimizers.sparse.lr), and keep the best "
    "checkpoint (storage.keep_best)"
)
