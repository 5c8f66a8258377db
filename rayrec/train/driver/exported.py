"""What a run shows to Prometheus, through Ray's own metrics: `ray_rayrec_…` of the driver's process, by its name.

`deploy/grafana-dashboard.json` draws it. Memory and processors of the workers are among what Ray itself exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.train.run.log import Record

# Name → what it is.
GAUGES = {
    "rayrec_step": "Steps made.",
    "rayrec_epoch": "The epoch that is trained on, from 1.",
    "rayrec_workers": "Workers of the group.",
    "rayrec_restarts": "How often a worker group was started again in this launch.",
    "rayrec_samples_per_second": "Rows a second over all workers, between two logging steps.",
    "rayrec_step_seconds": "Seconds a step took, between two logging steps.",
    "rayrec_data_wait_fraction": "The part of the training time that was spent waiting for data.",
    "rayrec_stall_fraction": "The part of the time in which training stood still for checkpoints and evaluations.",
    "rayrec_loss": "Loss between two logging steps.",
    "rayrec_ne": "Normalized entropy between two logging steps.",
    "rayrec_auc": "AUC between two logging steps.",
    "rayrec_eval_ne": "Normalized entropy of the last evaluation.",
    "rayrec_eval_auc": "AUC of the last evaluation.",
    "rayrec_checkpoint_time_seconds": "When the last checkpoint was complete, in Unix time.",
}
TAG = "run"


class ExportedMetrics:
    """Sets the gauges from a run's records; needs a connected Ray.

    Args:
        run: the run's name.
        batch_size: rows of a step over all workers.
    """

    def __init__(self, run: str, batch_size: int) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(name, description=text, tag_keys=(TAG,)) for name, text in GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({TAG: run})
        self._batch_size, self._first_attempt = batch_size, -1

    def __call__(self, record: Record) -> None:
        match record["kind"]:
            case "begin":
                if self._first_attempt < 0:
                    self._first_attempt = record["attempt"]
                self._set({"workers": record["world_size"], "restarts": record["attempt"] - self._first_attempt})
            case "train":
                rate = record["samples_per_second"]
                seconds = self._batch_size / rate if rate else None
                self._set({"step": record["step"], "epoch": record["epoch"] + 1, "step_seconds": seconds})
                names = ("samples_per_second", "data_wait_fraction", "stall_fraction", "loss", "ne", "auc")
                self._set({name: record.get(name) for name in names})
            case "eval":
                self._set({f"eval_{name}": record.get(name) for name in ("ne", "auc")})
            case "event" if record["event"] == "checkpoint":
                self._set({"checkpoint_time_seconds": record["time"]})

    def _set(self, values: Mapping[str, Any]) -> None:
        """What a model has no figure of keeps none."""
        for name, value in values.items():
            if value is not None:
                self._gauges[f"rayrec_{name}"].set(float(value))
