"""The names under which `RecMetricModule` reports: `<namespace>-<task>|<prefix><metric>`, as in TorchRec."""

from __future__ import annotations

from enum import Enum


class MetricPrefix(Enum):
    """Over which examples a figure is computed."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"

    def __str__(self) -> str:
        return self.value


def compose_metric_namespace(namespace: object, task_name: str) -> str:
    """`<namespace>-<task>`."""
    return f"{namespace}-{task_name}"


def compose_customized_metric_key(namespace: str, metric_name: str, description: str | None = None) -> str:
    """`<namespace>|<metric>`."""
    return f"{namespace}|{metric_name}{description or ''}"


def compose_metric_key(
    namespace: object,
    task_name: str,
    metric_name: object,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
    description: str | None = None,
) -> str:
    """`<namespace>-<task>|<prefix><metric>`."""
    head = compose_metric_namespace(namespace, task_name)
    return compose_customized_metric_key(head, f"{metric_prefix}{metric_name}", description)
