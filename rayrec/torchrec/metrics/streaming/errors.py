"""Metrics of single predictions: errors, rates at a threshold, means, counts and class recall."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayrec.torchrec.metrics.streaming.measure import REQUIRED, Examples, Measure, Options, Sums, share


def _squares(examples: Examples, options: Options) -> Sums:
    labels_TB = examples.labels_TB
    return {
        "error_sum": examples.weighted_sum((labels_TB - examples.predictions).square()),
        "weighted_num_samples": examples.weights_TB.sum(-1),
        "label_sum": examples.weighted_sum(labels_TB),
        "label_squared_sum": examples.weighted_sum(labels_TB.square()),
    }


def _mse(sums: Sums, options: Options) -> Sums:
    mse = share(sums["error_sum"], sums["weighted_num_samples"])
    values = {"mse": mse, "rmse": mse.sqrt()}
    if options["include_r_squared"]:
        spread = sums["label_squared_sum"] - sums["label_sum"].square() / sums["weighted_num_samples"]
        values["r_squared"] = torch.where(spread == 0, 1.0, 1 - sums["error_sum"] / spread)
    return values


def _nmse(sums: Sums, options: Options) -> Sums:
    """The error divided by that of always predicting 1."""
    constant_mse = share(sums["const_pred_error_sum"], sums["weighted_num_samples"])
    mse = share(sums["error_sum"], sums["weighted_num_samples"])
    return {"nmse": share(mse, constant_mse), "nrmse": share(mse.sqrt(), constant_mse.sqrt())}


def _at_threshold(predicted: bool, actual: bool) -> Callable[[Examples, Options], torch.Tensor]:
    """Computes the weight of the examples with a predicted and an actual class, where True is positive.

    A prediction equal to the threshold counts as both positive and negative, as in TorchRec.
    """

    def weight(examples: Examples, options: Options) -> torch.Tensor:
        predictions, threshold = examples.predictions, options["threshold"]
        is_predicted_TB = predictions >= threshold if predicted else predictions <= threshold
        return examples.weighted_sum(is_predicted_TB * (examples.labels_TB if actual else 1 - examples.labels_TB))

    return weight


_true_positives, _false_positives = _at_threshold(True, True), _at_threshold(True, False)
_false_negatives = _at_threshold(False, True)


def _classes(examples: Examples, options: Options) -> Sums:
    """Weight of the labels among the 1, 2, … C most likely classes."""
    ranks_TBC = examples.predictions.argsort(dim=-1, descending=True)
    hit_TBC = (ranks_TBC == examples.labels_TB.unsqueeze(-1)) * examples.weights_TB.unsqueeze(-1)
    total_T = examples.weights_TB.sum(-1)
    hits_TC = hit_TBC.sum(1).cumsum(-1)
    return {"tp_at_k": hits_TC, "total_weights": total_T.unsqueeze(-1).expand_as(hits_TC)}


def _sum_of(name: str, figure: str, values: Callable[[Examples], torch.Tensor]) -> Measure:
    """A metric that is a weighted sum."""
    return Measure(
        sums=(name,),
        of_batch=lambda examples, options: {name: examples.weighted_sum(values(examples))},
        results=lambda sums, options: {figure: sums[name]},
    )


def _averages(sums: Sums, options: Options) -> Sums:
    weight = sums["weighted_num_samples"]
    return {
        "label_average": share(sums["label_sum"], weight),
        "prediction_average": share(sums["prediction_sum"], weight),
    }


_THRESHOLD = {"threshold": 0.5}

ERRORS = {
    "mse": Measure(
        sums=("error_sum", "weighted_num_samples", "label_sum", "label_squared_sum"),
        of_batch=_squares,
        results=_mse,
        options={"include_r_squared": False},
    ),
    "nmse": Measure(
        sums=("error_sum", "weighted_num_samples", "label_sum", "label_squared_sum", "const_pred_error_sum"),
        of_batch=lambda examples, options: {
            **_squares(examples, options),
            "const_pred_error_sum": examples.weighted_sum((examples.labels_TB - 1).square()),
        },
        results=_nmse,
    ),
    "mae": Measure(
        sums=("error_sum", "weighted_num_samples"),
        of_batch=lambda examples, options: {
            "error_sum": examples.weighted_sum((examples.labels_TB - examples.predictions).abs()),
            "weighted_num_samples": examples.weights_TB.sum(-1),
        },
        results=lambda sums, options: {"mae": share(sums["error_sum"], sums["weighted_num_samples"])},
    ),
    "accuracy": Measure(
        sums=("accuracy_sum", "weighted_num_samples"),
        of_batch=lambda examples, options: {
            "accuracy_sum": examples.weighted_sum((examples.predictions >= options["threshold"]) == examples.labels_TB),
            "weighted_num_samples": examples.weights_TB.sum(-1),
        },
        results=lambda sums, options: {"accuracy": share(sums["accuracy_sum"], sums["weighted_num_samples"])},
        options=_THRESHOLD,
    ),
    "precision": Measure(
        sums=("true_pos_sum", "false_pos_sum"),
        of_batch=lambda examples, options: {
            "true_pos_sum": _true_positives(examples, options),
            "false_pos_sum": _false_positives(examples, options),
        },
        results=lambda sums, options: {
            "precision": share(sums["true_pos_sum"], sums["true_pos_sum"] + sums["false_pos_sum"])
        },
        options=_THRESHOLD,
    ),
    "recall": Measure(
        sums=("true_pos_sum", "false_neg_sum"),
        of_batch=lambda examples, options: {
            "true_pos_sum": _true_positives(examples, options),
            "false_neg_sum": _false_negatives(examples, options),
        },
        results=lambda sums, options: {
            "recall": share(sums["true_pos_sum"], sums["true_pos_sum"] + sums["false_neg_sum"])
        },
        options=_THRESHOLD,
    ),
    "multiclass_recall": Measure(
        sums=("tp_at_k", "total_weights"),
        of_batch=_classes,
        results=lambda sums, options: {"multiclass_recall": sums["tp_at_k"] / sums["total_weights"]},
        options={"number_of_classes": REQUIRED},
        shape=lambda options: (options["number_of_classes"],),
    ),
    "average": Measure(
        sums=("label_sum", "prediction_sum", "weighted_num_samples"),
        of_batch=lambda examples, options: {
            "label_sum": examples.weighted_sum(examples.labels_TB),
            "prediction_sum": examples.weighted_sum(examples.predictions),
            "weighted_num_samples": examples.weights_TB.sum(-1),
        },
        results=_averages,
    ),
    "weighted_avg": Measure(
        sums=("weighted_sum", "weighted_num_samples"),
        of_batch=lambda examples, options: {
            "weighted_sum": examples.weighted_sum(examples.predictions),
            "weighted_num_samples": examples.weights_TB.sum(-1),
        },
        results=lambda sums, options: {"weighted_avg": sums["weighted_sum"] / sums["weighted_num_samples"]},
    ),
    "scalar": Measure(
        sums=("labels", "window_count"),
        of_batch=lambda examples, options: {
            "labels": examples.labels_TB.mean(-1),
            "window_count": torch.ones_like(examples.labels_TB[:, 0]),
        },
        results=lambda sums, options: {"scalar": sums["labels"] / sums["window_count"]},
        last_only=True,
    ),
    "num_positive_samples": _sum_of(
        "weighted_pos_sum", "num_positive_samples", lambda examples: examples.labels_TB.nan_to_num(0)
    ),
    "sum_weights": _sum_of("weighted_sum", "sum_weights", lambda examples: torch.ones_like(examples.labels_TB)),
    "num_missing_labels": _sum_of(
        "missing_label_sum", "num_missing_labels", lambda examples: examples.labels_TB.isnan()
    ),
    "weighted_sum_predictions": _sum_of(
        "weighted_predictions_sum", "weighted_sum_predictions", lambda examples: examples.predictions.nan_to_num(0)
    ),
}
