"""Drift of scores: how far they are from those of evaluation."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from rayrec.serve.metrics import ServiceMetrics, stability_index


def test_the_index_is_zero_of_equally_full_bins_and_large_of_others() -> None:
    assert stability_index(np.full(10, 7)) == pytest.approx(0) and stability_index(np.array([9, 1])) > 0.25


def test_drift_is_told_of_many_scores_and_forgets_early_ones() -> None:
    stats, version, trained = ServiceMetrics(), ("ctr", "v1"), {"label": np.linspace(0, 1, 11).tolist()}
    even = {"label": np.linspace(0.001, 0.999, 999, dtype=np.float32)}
    stats.scores(*version, even, trained)
    assert b"rayrec_score_drift{" not in stats.text([version])
    stats.scores(*version, even, trained)
    assert _drift(stats, version) < 0.01
    for _ in range(300):
        stats.scores(*version, {"label": np.full(1000, 0.95, np.float32)}, trained)
    drifted = _drift(stats, version)
    for _ in range(300):
        stats.scores(*version, even, trained)
    assert drifted > 2 and _drift(stats, version) < 0.5


def _drift(stats: ServiceMetrics, version: tuple[str, str]) -> float:
    (line,) = [line for line in stats.text([version]).decode().splitlines() if line.startswith("rayrec_score_drift{")]
    return float(line.rpartition(" ")[2])


def test_series_of_a_version_go_when_it_has_gone_and_its_last_counts_are_told() -> None:
    stats, trained = ServiceMetrics(), {"label": [0.0, 0.5, 1.0]}

    def score(version: str) -> None:
        stats.scores("ctr", version, {"label": np.full(3, 0.1, np.float32)}, trained)
        stats.scored("ctr", version, 3, 0.01)

    def versions_told(active: str) -> set[str]:
        return set(re.findall(r'version="(\w+)"', stats.text([("ctr", active)]).decode()))

    for number in range(50):
        score(f"v{number}")
        assert versions_told(f"v{number}") == {f"v{n}" for n in (number - 1, number) if n >= 0}
    score("v49")
    assert versions_told("v50") == {"v49"}
    assert versions_told("v50") == set() and not stats._score_counts
    score("v49")  # a request that began with it
    assert versions_told("v50") == set()
