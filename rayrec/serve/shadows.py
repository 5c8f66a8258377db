"""Versions that answer nobody: they score some requests again, and the difference of the scores is measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from rayrec.serve.behind import Behind
from rayrec.serve.measures import Measures
from rayrec.serve.traffic import Answer, ScoreRequest, place_of
from rayrec.serve.versions import Versions

_logger = logging.getLogger(__name__)
_Item = tuple[ScoreRequest, Answer, Versions]


class Shadows:
    """
    Args:
        shadows: by model: (share of the requests, version).
    """

    def __init__(self, shadows: Mapping[str, Sequence[tuple[float, Versions]]], measures: Measures) -> None:
        self._shadows, self._measures = shadows, measures
        self._behind = Behind[_Item]("shadow", lambda item: None if item is None else self._score(*item))

    def offer(self, requests: Sequence[ScoreRequest], answers: Sequence[Answer]) -> None:
        """What does not fit the queue is not scored, and counted."""
        for request, answer in zip(requests, answers, strict=True):
            for share, versions in self._shadows.get(request.name, ()):
                if place_of(f"shadow {request.id}") < share and not self._behind.offer((request, answer, versions)):
                    self._measures.shadow(request.name, versions.active.version, "dropped")

    def close(self) -> None:
        """Scores what waits, and ends."""
        self._behind.close()

    def _score(self, request: ScoreRequest, answer: Answer, versions: Versions) -> None:
        loaded = versions.active
        try:
            batch, context = loaded.reader.batch([request.query])
            outputs = loaded.model.outputs(batch, context)
        except Exception as error:  # another schema may refuse what the answering version takes
            _logger.warning("shadow %s, request %s: %s", loaded.version, request.id, type(error).__name__)
            self._measures.shadow(request.name, loaded.version, "failed")
            return
        differences = [
            float(np.abs(outputs[label] - values).max()) for label, values in answer.scores.items() if label in outputs
        ]
        self._measures.shadow(request.name, loaded.version, "scored", max(differences, default=0.0))
