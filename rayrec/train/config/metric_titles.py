"""Titles of metrics by name, for the report and the console. The report lists metrics in this order."""

from __future__ import annotations

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
