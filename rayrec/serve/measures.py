"""Metrics of a service, for Prometheus: latency, rows, unknown ids, drift of the scores against training."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from rayrec.data import Schema
from rayrec.data.mapping.schema import Vocabulary
from rayrec.sparse import KeyedJaggedTensor

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LEAST, MOST = 1_000, 100_000  # scores that drift needs; beyond the most, earlier ones are halved, repeatedly


class Measures:
    """Counters of one replica; every line names it, for they may be read through a balancer, of one after the other."""

    def __init__(self) -> None:
        self.replica = f"{socket.gethostname()}:{os.getpid()}"
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        of_version = ["model", "version"]
        self._seconds = histogram("rayrec_request_seconds", "time of a request", of_version, buckets=SECONDS)
        self._requests = counter("rayrec_requests", "requests by HTTP status", ["model", "status"])
        self._together = histogram("rayrec_batch_requests", "requests scored together", ["model"], buckets=BATCHES)
        self._rows = counter("rayrec_rows", "rows that were scored", of_version)
        self._ids = counter("rayrec_ids", "ids of features with a vocabulary", ["model", "feature"])
        self._unknown = counter("rayrec_unknown_ids", "those outside the vocabulary", ["model", "feature"])
        text = f"population stability index of the last {MOST:,} scores or so against evaluation"
        self._drift = gauge("rayrec_score_drift", text, ["model", "label"])
        self._versions = counter("rayrec_versions", "versions by what became of them", ["model", "outcome"])
        text = "requests of shadow versions by outcome"
        self._shadows = counter("rayrec_shadow_requests", text, [*of_version, "outcome"])
        text = "greatest difference of a score of a request from the answer"
        self._differences = histogram("rayrec_shadow_difference", text, of_version, buckets=DIFFERENCES)
        self._logged = counter("rayrec_logged_requests", "requests of the feature log by outcome", ["model", "outcome"])
        self._seen: dict[tuple[str, str, str], npt.NDArray[np.int64]] = {}
        self._series: set[tuple[str, ...]] = set()  # model and version, and of shadows the outcome
        self._active: set[tuple[str, str]] = set()
        self._turn = threading.Lock()  # requests are counted in another thread than figures are read

    def request(self, model: str, status: int) -> None:
        self._requests.labels(model, str(status)).inc()

    def scored(self, model: str, version: str, rows: int, seconds: float) -> None:
        with self._turn:
            self._series.add((model, version))
            self._seconds.labels(model, version).observe(seconds)
            self._rows.labels(model, version).inc(rows)

    def together(self, model: str, requests: int) -> None:
        self._together.labels(model).observe(requests)

    def version(self, model: str, outcome: str) -> None:
        self._versions.labels(model, outcome).inc()

    def logged(self, model: str, outcome: str) -> None:
        """A request of the feature log: "logged" or "dropped"; or a "lost file"."""
        self._logged.labels(model, outcome).inc()

    def shadow(self, model: str, version: str, outcome: str, difference: float = 0.0) -> None:
        """A request of a shadow version: "scored", "failed" or "dropped"."""
        with self._turn:
            self._series.add((model, version, outcome))
            self._shadows.labels(model, version, outcome).inc()
            if outcome == "scored":
                self._differences.labels(model, version).observe(difference)

    def ids(self, model: str, schema: Schema, sparse: KeyedJaggedTensor) -> None:
        """How many ids the vocabularies did not know: they were given one of the first rows."""
        for feature in schema.sparse:
            if isinstance(feature.mapping, Vocabulary) and feature.name in sparse.index_per_key():
                rows = sparse[feature.name].values()
                self._ids.labels(model, feature.name).inc(rows.numel())
                self._unknown.labels(model, feature.name).inc(int((rows < feature.mapping.oov_rows).sum()))

    def scores(
        self, model: str, version: str, found: Mapping[str, npt.NDArray[np.float32]], trained: Mapping[str, list[float]]
    ) -> None:
        """Counts scores by the deciles that they had in evaluation."""
        for label, values in found.items():
            edges = trained.get(label)
            if edges is None:
                continue
            found_in = np.bincount(np.searchsorted(edges[1:-1], values), minlength=len(edges) - 1)
            with self._turn:
                counts = self._seen.setdefault((model, version, label), np.zeros(len(edges) - 1, np.int64))
                counts += found_in
                if counts.sum() > MOST:
                    counts //= 2

    def text(self, active: Sequence[tuple[str, str]]) -> bytes:
        """The exposition format; drift is that of the active versions, once there are enough scores. A version that no
        longer answers is in it once more, with its last counts."""
        with self._turn:
            self._forget(self._active.union(active))
            self._active = set(active)
            for (model, version, label), counts in self._seen.items():
                if (model, version) in active and counts.sum() >= LEAST:
                    self._drift.labels(model, label).set(stability_index(counts))
        return generate_latest(self)

    def _forget(self, kept: set[tuple[str, str]]) -> None:
        """Removes the series of all other versions."""
        for model, version, *shadow in [one for one in self._series if one[:2] not in kept]:
            for metric in (self._shadows,) if shadow else (self._seconds, self._rows):
                metric.remove(model, version, *shadow)
            if shadow == ["scored"]:
                self._differences.remove(model, version)
            self._series.remove((model, version, *shadow))
        self._seen = {key: counts for key, counts in self._seen.items() if key[:2] in kept}

    def collect(self) -> Iterator[Metric]:
        """Every figure with the replica's name."""
        for metric in self.registry.collect():
            metric.samples = [s._replace(labels={**s.labels, "replica": self.replica}) for s in metric.samples]
            yield metric


def stability_index(counts: npt.NDArray[np.int64]) -> float:
    """Of counts in bins that should be equally full: 0 is no drift, above 0.25 is commonly taken for a real one."""
    shares = np.maximum(counts / counts.sum(), 1e-6)
    expected = 1 / len(counts)
    return float(sum((share - expected) * math.log(share / expected) for share in shares))
