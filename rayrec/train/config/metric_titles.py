"""Titles of metrics by name, for the report and the console. The report lists metrics in this order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "ne": "normalized entropy",
    "logloss": "log loss",
    "calibration": "calibration",
    "ece": "ECE",
    "auprc": "AUPRC",
    "accuracy": "accuracy",
    "ndcg@10": "NDCG@10",
    "recall@10": "recall@10",
    "recall@50": "recall@50",
    "mrr": "MRR",
    "rmse": "RMSE",
    "r2": "R²",
}
SHORT_TITLES = TITLES | {"ne": "NE", "recall@10": "HR@10"}


def cutoff(figures: Mapping[str, Any]) -> int:
    """The k that stands for the metrics of a retriever: 10, or else the smallest of `trainer.ranking.ks`."""
    ks = [int(name.removeprefix("ndcg@")) for name in figures if re.fullmatch(r"ndcg@\d+", name)]
    return 10 if 10 in ks or not ks else min(ks)
