"""Metrics of predicted rates: normalized entropy and its variants, calibration, CTR (He et al., "Practical lessons from
predicting clicks on ads at Facebook", 2014)."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import REQUIRED, Examples, Measure, Options, Sums, share

TINY = 1e-12  # lower bound of probabilities and weights


def _entropy_sums(examples: Examples, predictions_TB: torch.Tensor, weights_TB: torch.Tensor) -> dict[str, Any]:
    """The sums of normalized entropy, in bits."""
    clamped_TB, labels_TB = predictions_TB.clamp(TINY, 1 - TINY), examples.labels_TB
    bits_TB = labels_TB * clamped_TB.log2() + (1 - labels_TB) * (1 - clamped_TB).log2()
    return {
        "cross_entropy_sum": -(weights_TB * bits_TB).sum(-1),
        "weighted_num_samples": weights_TB.sum(-1),
        "pos_labels": (weights_TB * labels_TB).sum(-1),
        "neg_labels": (weights_TB * (1 - labels_TB)).sum(-1),
    }


_ENTROPY_SUMS = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")


def _base_entropy(sums: Sums) -> torch.Tensor:
    """Cross entropy of always predicting the mean label."""
    mean = (sums["pos_labels"] / sums["weighted_num_samples"].clamp(min=TINY)).clamp(TINY, 1 - TINY)
    return -sums["pos_labels"] * mean.log2() - sums["neg_labels"] * (1 - mean).log2()


def _or_missing(ne: torch.Tensor, sums: Sums, options: Options) -> torch.Tensor:
    """Replaces NE by `TINY` for tasks with zero total weight, if the option is set."""
    missing = options.get("allow_missing_label_with_zero_weight", False)
    return torch.where(sums["weighted_num_samples"] > 0, ne, TINY) if missing else ne


def _ne(name: str) -> Any:
    def results(sums: Sums, options: Options) -> Sums:
        values = {name: _or_missing(sums["cross_entropy_sum"] / _base_entropy(sums), sums, options)}
        if options.get("include_logloss"):
            weight = (sums["pos_labels"] + sums["neg_labels"]).clamp(min=TINY)
            values["logloss"] = sums["cross_entropy_sum"] / weight
        return values

    return results


def _recalibrated(examples: Examples, options: Options) -> torch.Tensor:
    """Predictions corrected for training on a sample of the negatives."""
    odds = examples.predictions
    return odds / (odds + (1 - odds) / options["recalibration_coefficient"])


def _positive_sums(examples: Examples, options: Options) -> Sums:
    sums = _entropy_sums(examples, examples.predictions, examples.weights_TB)
    bits_TB = examples.labels_TB * examples.predictions.clamp(min=TINY).log2()
    return sums | {"cross_entropy_positive_sum": -examples.weighted_sum(bits_TB)}


def _calibration_free(sums: Sums, options: Options) -> Sums:
    """NE divided by that of always predicting the mean prediction."""
    mean = sums["weighted_sum_predictions"] / sums["weighted_num_samples"]
    negatives = sums["weighted_num_samples"] - sums["pos_labels"]
    biased = -sums["pos_labels"] * mean.log2() - negatives * (1 - mean).log2()
    ne = sums["cross_entropy_sum"] / _base_entropy(sums) / biased
    return {"cali_free_ne": _or_missing(ne, sums, options)}


def _weighted(examples: Examples, options: Options) -> Sums:
    return _entropy_sums(examples, examples.predictions, examples.weights_TB)


def _grouped_sums(examples: Examples, options: Options) -> Sums:
    """The sums of each group, each [T, G]."""
    name = options["grouping_keys"]
    keys = examples.inputs[name]
    if keys.is_floating_point() and not options["cast_keys_to_int"]:
        raise ValueError(f"grouping key {name!r} is {keys.dtype}: make it int64, or set cast_keys_to_int=True")
    keys_TB = keys.long().expand(examples.labels_TB.shape)
    clamped_TB = examples.predictions.clamp(TINY, 1 - TINY)
    bits_TB = examples.labels_TB * clamped_TB.log2() + (1 - examples.labels_TB) * (1 - clamped_TB).log2()
    terms = (-bits_TB, torch.ones_like(bits_TB), examples.labels_TB, 1 - examples.labels_TB)
    zeros_TG = bits_TB.new_zeros(len(bits_TB), options["num_groups"])
    return {
        name: zeros_TG.scatter_add(1, keys_TB, examples.weights_TB * term_TB)
        for name, term_TB in zip(_ENTROPY_SUMS, terms, strict=True)
    }


def _of_groups(sums: Sums, options: Options) -> Sums:
    ne_TG = (sums["cross_entropy_sum"] / _base_entropy(sums)).float()
    values = {f"segmented_ne_{group}": ne_TG[:, group] for group in range(options["num_groups"])}
    if options["include_logloss"]:
        loss_TG = sums["cross_entropy_sum"] / (sums["pos_labels"] + sums["neg_labels"]).clamp(min=TINY)
        values |= {f"logloss_{group}": loss_TG[:, group] for group in range(options["num_groups"])}
    return values


def _calibration_sums(examples: Examples, predictions_TB: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "calibration_num": examples.weighted_sum(predictions_TB),
        "calibration_denom": examples.weighted_sum(examples.labels_TB),
    }


def _calibration(sums: Sums, options: Options) -> Sums:
    return {"calibration": share(sums["calibration_num"], sums["calibration_denom"])}


def _seen(examples: Examples) -> dict[str, torch.Tensor]:
    return {"num_examples": examples.weights_TB.count_nonzero(-1)}


def _examples(sums: Sums) -> Sums:
    return {"total_examples": sums["num_examples"].long()}


_CALIBRATION_SUMS = ("calibration_num", "calibration_denom")
_MISSING = {"allow_missing_label_with_zero_weight": False}
_NE = {"include_logloss": False} | _MISSING

RATES = {
    "ne": Measure(sums=_ENTROPY_SUMS, of_batch=_weighted, results=_ne("ne"), options=_NE),
    "ne_positive": Measure(
        sums=("cross_entropy_positive_sum", *_ENTROPY_SUMS[1:]),
        of_batch=_positive_sums,
        results=lambda sums, options: {
            "ne_positive": _or_missing(sums["cross_entropy_positive_sum"] / _base_entropy(sums), sums, options)
        },
        options=_MISSING,
    ),
    "unweighted_ne": Measure(
        sums=_ENTROPY_SUMS,
        of_batch=lambda examples, options: _entropy_sums(
            examples, examples.predictions, torch.ones_like(examples.labels_TB)
        ),
        results=_ne("unweighted_ne"),
        options=_MISSING,
    ),
    "cali_free_ne": Measure(
        sums=(*_ENTROPY_SUMS, "weighted_sum_predictions"),
        of_batch=lambda examples, options: {
            **_weighted(examples, options),
            "weighted_sum_predictions": examples.weighted_sum(examples.predictions),
        },
        results=_calibration_free,
        options=_MISSING,
    ),
    "recalibrated_ne": Measure(
        sums=_ENTROPY_SUMS,
        of_batch=lambda examples, options: _entropy_sums(
            examples, _recalibrated(examples, options), examples.weights_TB
        ),
        results=_ne("ne"),
        options=_NE | {"recalibration_coefficient": 1.0},
    ),
    "serving_ne": Measure(
        sums=(*_ENTROPY_SUMS, "num_examples"),
        of_batch=lambda examples, options: {**_weighted(examples, options), **_seen(examples)},
        results=_ne("ne"),
        totals=_examples,
    ),
    "segmented_ne": Measure(
        sums=_ENTROPY_SUMS,
        of_batch=_grouped_sums,
        results=_of_groups,
        options={
            "num_groups": REQUIRED,
            "grouping_keys": "grouping_keys",
            "cast_keys_to_int": False,
            "include_logloss": False,
        },
        shape=lambda options: (options["num_groups"],),
        inputs=lambda options: {options["grouping_keys"]},
    ),
    "calibration": Measure(
        sums=_CALIBRATION_SUMS,
        of_batch=lambda examples, options: _calibration_sums(examples, examples.predictions),
        results=_calibration,
    ),
    "recalibrated_calibration": Measure(
        sums=_CALIBRATION_SUMS,
        of_batch=lambda examples, options: _calibration_sums(examples, _recalibrated(examples, options)),
        results=_calibration,
        options={"recalibration_coefficient": 1.0},
    ),
    "serving_calibration": Measure(
        sums=(*_CALIBRATION_SUMS, "num_examples"),
        of_batch=lambda examples, options: _calibration_sums(examples, examples.predictions) | _seen(examples),
        results=_calibration,
        totals=_examples,
    ),
    "ctr": Measure(
        sums=("ctr_num", "ctr_denom"),
        of_batch=lambda examples, options: {
            "ctr_num": examples.weighted_sum(examples.labels_TB),
            "ctr_denom": examples.weights_TB.sum(-1),
        },
        results=lambda sums, options: {"ctr": share(sums["ctr_num"], sums["ctr_denom"])},
    ),
}
