"""Versions that answer nobody: they score some requests again, and the difference of the scores is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rayrec.serve.aside import Aside
from rayrec.serve.errors import BadRequest
from rayrec.serve.measures import Measures
from rayrec.serve.traffic import Answer, ScoreRequest, place_of
from rayrec.serve.versions import Versions

_QUEUE = 64  # requests that may wait to be scored again


class Shadows:
    """By model: (share of the requests, version)."""

    def __init__(self, shadows: Mapping[str, Sequence[tuple[float, Versions]]], measures: Measures) -> None:
        self._shadows, self._measures = shadows, measures
        self._aside = Aside("rayrec-shadow", self._score, _QUEUE)

    def offer(self, requests: Sequence[ScoreRequest], answers: Sequence[Answer]) -> None:
        """What does not fit the queue is not scored, and counted."""
        for request, answer in zip(requests, answers, strict=True):
            for share, versions in self._shadows.get(request.name, ()):
                if place_of(f"shadow {request.id}") >= share:
                    continue
                if not self._aside.offer((request, answer, versions)):
                    self._measures.shadow(request.name, versions.active.version, "dropped")

    def close(self) -> None:
        self._aside.close()

    def _score(self, item: tuple[ScoreRequest, Answer, Versions]) -> None:
        request, answer, versions = item
        loaded = versions.active
        try:
            batch, context = loaded.reader.batch([request.query])
            outputs = loaded.model.outputs(batch, context)
        except (BadRequest, ValueError):  # another schema may refuse what the answering version takes
            self._measures.shadow(request.name, loaded.version, "failed")
            return
        differences = [
            float(np.abs(outputs[label] - values).max()) for label, values in answer.scores.items() if label in outputs
        ]
        self._measures.shadow(request.name, loaded.version, "scored", max(differences, default=0.0))
