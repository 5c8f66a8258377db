"""`Service`: models by name, their versions and shares of the requests. Knows neither HTTP nor Ray."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.serve.config import ModelSpec
from rayrec.serve.errors import BadRequest
from rayrec.serve.limits import Limits
from rayrec.serve.measures import Measures
from rayrec.serve.requests import Query
from rayrec.serve.versions import Loaded, Versions


@dataclass(frozen=True, slots=True)
class Answer:
    """The scores of a request: label → float32 [n]."""

    model: str
    version: str
    scores: dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request on its way: its model, the version that answers it, what was read, and when it came."""

    name: str
    loaded: Loaded
    query: Query
    begin: float


class Service:
    """Scores requests, and swaps versions meanwhile.

    Args:
        models: at least one.
        watch_s: seconds between two looks for newer versions; 0: never.

    Raises:
        ExportError, ValueError: a model cannot be loaded.
    """

    def __init__(self, models: Sequence[ModelSpec], limits: Limits | None = None, watch_s: float = 0.0) -> None:
        self.limits, self.measures = limits or Limits(), Measures()
        self._models: dict[str, list[tuple[float, Versions]]] = {}
        for spec in models:
            versions = Versions(spec.folder, self.limits, self._on_change(spec.name))
            self._models.setdefault(spec.name, []).append((spec.share, versions))
        self.default = models[0].name
        self.log: list[tuple[str, str, str, str]] = []
        self._closing = threading.Event()
        if watch_s:
            threading.Thread(target=self._watch, args=(watch_s,), daemon=True, name="rayrec-watch").start()

    def score(self, body: bytes, content_type: str, model: str | None = None) -> Answer:
        """
        Raises:
            BadRequest: the request is wrong, in any way.
        """
        (answer,) = self.answers([self.read(body, content_type, model)])
        if isinstance(answer, BadRequest):
            raise answer
        return answer

    def read(self, body: bytes, content_type: str, model: str | None = None) -> ScoreRequest:
        """A request that was read, and the version that will answer it.

        Raises:
            BadRequest: the body cannot be parsed, or there is no such model.
        """
        begin = time.perf_counter()
        name, loaded = self._choose(model)
        return ScoreRequest(name, loaded, loaded.reader.read(body, content_type), begin)

    def answers(self, requests: Sequence[ScoreRequest]) -> list[Answer | BadRequest]:
        """Of requests for one version, of one form: scored as one batch, without those that are wrong."""
        if not requests:
            return []
        try:
            return list(self._answers(requests))
        except BadRequest as error:
            if len(requests) == 1:
                return [error]
            wrong = _wrong_alone(requests, error.queries) or _wrong_alone(requests, range(len(requests)))
        if not wrong:  # together they have too many ids, or what is wrong is found in scoring
            return [answer for one in requests for answer in self.answers([one])]
        others = iter(self.answers([one for place, one in enumerate(requests) if place not in wrong]))
        return [wrong[place] if place in wrong else next(others) for place in range(len(requests))]

    def _answers(self, requests: Sequence[ScoreRequest]) -> list[Answer]:
        begin, name, loaded = time.perf_counter(), requests[0].name, requests[0].loaded
        batch, context = loaded.reader.batch([one.query for one in requests])
        try:
            logits = loaded.model.score(batch, context)
        except ValueError as error:
            raise BadRequest(422, str(error)) from error
        probabilities = torch.sigmoid(logits).view(batch.rows, -1).T.contiguous().numpy()
        scores = dict(zip(loaded.model.labels, probabilities, strict=True))
        now = time.perf_counter()
        loaded.pace.observe(batch.rows, now - begin)
        for sparse in (batch.sparse, context):
            if sparse is not None:
                self.measures.ids(name, loaded.reader.schema, sparse)
        self.measures.scores(name, loaded.version, scores, loaded.quantiles)
        self.measures.together(name, len(requests))
        answers, stop = [], 0
        for one in requests:
            start, stop = stop, stop + one.query.size
            self.measures.scored(name, loaded.version, one.query.size, now - one.begin)
            part = {label: values[start:stop] for label, values in scores.items()}
            answers.append(Answer(name, loaded.version, part))
        return answers

    @property
    def names(self) -> frozenset[str]:
        """Of all models."""
        return frozenset(self._models)

    def refresh(self) -> int:
        """Looks for newer versions now; returns how many took over."""
        return sum(versions.refresh() for _, versions in self._all())

    def health(self) -> dict[str, Any]:
        """This process, its cores, every model's version, folder and share, why it is slower here than it could be, and
        versions that were refused, with the reason."""
        return {
            "status": "ok",
            "pid": os.getpid(),
            "cores": torch.get_num_threads(),
            "models": [
                {
                    "name": name,
                    "version": versions.active.version,
                    "folder": str(versions.active.folder),
                    "share": share,
                    "warnings": versions.active.model.warnings,
                    "refused": dict(versions.refused),
                }
                for name, of in self._models.items()
                for share, versions in of
            ],
        }

    def schema(self, model: str | None = None) -> dict[str, Any]:
        """What a request for a model must hold."""
        name, loaded = self._choose(model)
        schema = loaded.reader.schema
        return {
            "model": name,
            "version": loaded.version,
            "labels": list(loaded.model.labels),
            "dense": [feature.model_dump(mode="json") for feature in schema.dense],
            "sparse": [feature.model_dump(mode="json", exclude={"mapping": {"path"}}) for feature in schema.sparse],
            "limits": {
                "rows": self.limits.rows,
                "body_bytes": self.limits.body_bytes,
                "ids": self.limits.ids,
                "queue": self.limits.queue,
            },
        }

    def metrics(self) -> bytes:
        """For Prometheus."""
        return self.measures.text([(name, versions.active.version) for name, versions in self._all()])

    def close(self) -> None:
        """Ends the watch."""
        self._closing.set()

    def _all(self) -> list[tuple[str, Versions]]:
        return [(name, versions) for name, of in self._models.items() for _, versions in of]

    def _choose(self, model: str | None) -> tuple[str, Loaded]:
        name = model or self.default
        found = self._models.get(name)
        if found is None:
            raise BadRequest(404, f"there is no model {name!r}; there are {', '.join(self._models)}")
        versions = found[0][1]
        if len(found) > 1:
            (versions,) = random.choices([of for _, of in found], [share for share, _ in found])
        return name, versions.active  # taken once: a request has one version from beginning to end

    def _on_change(self, name: str) -> Any:
        def record(outcome: str, version: str, what: str) -> None:
            self.measures.version(name, outcome)
            self.log.append((name, outcome, version, what))
            del self.log[:-100]

        return record

    def _watch(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            self.refresh()


def _wrong_alone(requests: Sequence[ScoreRequest], places: Iterable[int]) -> dict[int, BadRequest]:
    """Which of the requests at some places cannot be mapped, and why; nothing is scored."""
    found = {}
    for place in sorted(places):
        try:
            requests[place].loaded.reader.batch([requests[place].query])
        except BadRequest as error:
            found[place] = error
    return found
