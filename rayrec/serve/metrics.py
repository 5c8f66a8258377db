"""Prometheus metrics of a replica: latency, rows, unknown ids, drift of the scores against training."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from rayrec.data import Schema
from rayrec.data.mapping.rules import Vocabulary
from rayrec.sparse import KeyedJaggedTensor

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Drift is reported from MIN_SCORES on. Above MAX_SCORES the counts are halved, so that older scores count less.
MIN_SCORES, MAX_SCORES = 1_000, 100_000


class ServiceMetrics:
    """Metrics of one replica.

    Every series has the label `replica`: behind a load balancer, each read may reach another replica.
    """

    def __init__(self) -> None:
        self.replica = f"{socket.gethostname()}:{os.getpid()}"
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        by_version = ["model", "version"]
        self._seconds = histogram("rayrec_request_seconds", "time of a request", by_version, buckets=SECONDS)
        self._requests = counter("rayrec_requests", "requests by HTTP status", ["model", "status"])
        self._batch_requests = histogram(
            "rayrec_batch_requests", "requests scored in one batch", ["model"], buckets=BATCHES
        )
        self._rows = counter("rayrec_rows", "scored rows", by_version)
        self._ids = counter("rayrec_ids", "ids of features with a vocabulary", ["model", "feature"])
        self._unknown = counter("rayrec_unknown_ids", "ids outside the vocabulary", ["model", "feature"])
        help_text = f"population stability index of about the last {MAX_SCORES:,} scores against evaluation"
        self._drift = gauge("rayrec_score_drift", help_text, ["model", "label"])
        self._versions = counter("rayrec_versions", "versions by outcome", ["model", "outcome"])
        help_text = "age of the newest data that the active version was trained on"
        self._freshness = gauge("rayrec_freshness_seconds", help_text, ["model"])
        self._logged = counter("rayrec_logged_requests", "requests of the feature log by outcome", ["model", "outcome"])
        self._score_counts: dict[tuple[str, str, str], npt.NDArray[np.int64]] = {}
        self._series: set[tuple[str, str]] = set()  # (model, version)
        self._active: set[tuple[str, str]] = set()
        self._lock = threading.Lock()  # requests are counted in one thread and metrics are read in another

    def request(self, model: str, status: int) -> None:
        self._requests.labels(model, str(status)).inc()

    def scored(self, model: str, version: str, rows: int, seconds: float) -> None:
        with self._lock:
            self._series.add((model, version))
            self._seconds.labels(model, version).observe(seconds)
            self._rows.labels(model, version).inc(rows)

    def retrieved(self, index: str, version: str, seconds: float) -> None:
        with self._lock:
            self._series.add((index, version))
            self._seconds.labels(index, version).observe(seconds)

    def batch(self, model: str, requests: int) -> None:
        self._batch_requests.labels(model).observe(requests)

    def version(self, model: str, outcome: str) -> None:
        self._versions.labels(model, outcome).inc()

    def logged(self, model: str, outcome: str) -> None:
        """
        Args:
            outcome: "logged" or "dropped" for a request, "lost file" for a file that could not be written.
        """
        self._logged.labels(model, outcome).inc()

    def ids(self, model: str, schema: Schema, sparse: KeyedJaggedTensor) -> None:
        """Counts ids and unknown ids, which the mapping gives the first `oov_rows` rows."""
        for feature in schema.sparse:
            if isinstance(feature.mapping, Vocabulary) and feature.name in sparse.index_per_key():
                rows = sparse[feature.name].values()
                self._ids.labels(model, feature.name).inc(rows.numel())
                self._unknown.labels(model, feature.name).inc(int((rows < feature.mapping.oov_rows).sum()))

    def scores(
        self,
        model: str,
        version: str,
        scores: Mapping[str, npt.NDArray[np.float32]],
        quantiles: Mapping[str, list[float]],
    ) -> None:
        """Counts scores between the quantiles of the evaluation scores, by label."""
        for label, values in scores.items():
            edges = quantiles.get(label)
            if edges is None:
                continue
            bin_counts = np.bincount(np.searchsorted(edges[1:-1], values), minlength=len(edges) - 1)
            with self._lock:
                counts = self._score_counts.setdefault((model, version, label), np.zeros(len(edges) - 1, np.int64))
                counts += bin_counts
                if counts.sum() > MAX_SCORES:
                    counts //= 2

    def text(self, active: Sequence[tuple[str, str]]) -> bytes:
        """Prometheus exposition format.

        Args:
            active: (model, version) of the versions that answer. Drift is reported for them only. A version that
                retired since the last call is reported once more, then removed.
        """
        with self._lock:
            self._remove_except(self._active.union(active))
            self._active = set(active)
            for (model, version, label), counts in self._score_counts.items():
                if (model, version) in active and counts.sum() >= MIN_SCORES:
                    self._drift.labels(model, label).set(stability_index(counts))
        return generate_latest(self)

    def fresh(self, model: str, trained_to: float | None) -> None:
        """
        Args:
            trained_to: Time of the newest data of the active version, in seconds since 1970; None if it is not known.
        """
        if trained_to is not None:
            self._freshness.labels(model).set(max(0.0, time.time() - trained_to))

    def _remove_except(self, versions: set[tuple[str, str]]) -> None:
        for model, version in self._series - versions:
            for metric in (self._seconds, self._rows):
                with suppress(KeyError):  # an index has no rows
                    metric.remove(model, version)
        self._series &= versions
        self._score_counts = {key: counts for key, counts in self._score_counts.items() if key[:2] in versions}

    def collect(self) -> Iterator[Metric]:
        """Adds the label `replica` to every sample."""
        for metric in self.registry.collect():
            metric.samples = [s._replace(labels={**s.labels, "replica": self.replica}) for s in metric.samples]
            yield metric


def stability_index(counts: npt.NDArray[np.int64]) -> float:
    """Population stability index against equal bins: 0 means equal; above 0.25 is commonly considered drift."""
    shares = np.maximum(counts / counts.sum(), 1e-6)
    expected = 1 / len(counts)
    return float(sum((share - expected) * math.log(share / expected) for share in shares))
