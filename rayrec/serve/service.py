"""`Service`: models by name, their versions and shares of the requests. Knows neither HTTP nor Ray."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rayrec.serve.behind import Shadows
from rayrec.serve.config import LogConfig, ModelSpec
from rayrec.serve.errors import BadRequest
from rayrec.serve.feature_log import FeatureLog
from rayrec.serve.limits import Limits
from rayrec.serve.measures import Measures
from rayrec.serve.requests import Query
from rayrec.serve.traffic import Answer, ScoreRequest, Target, by_share, place_of
from rayrec.serve.versions import Loaded, Versions
from rayrec.storage.cache import CACHE_BYTES

audit = logging.getLogger("rayrec.serve.audit")  # a line for each version that takes over, or is refused


def settle() -> None:
    """Has Python's collector pass over what is there now, torch above all, once and for all: to look at it again, as it
    would after some hundred requests of many lists, stops every request for 0.2 s."""
    gc.collect()
    gc.freeze()


class Service:
    """Scores requests, and swaps versions meanwhile.

    Args:
        models: the first is the default; without any, nothing is scored.
        watch_s: seconds between two looks for newer versions; 0: never.
        log: requests to keep; None: none.
        cache_bytes: that copies of exports in object storage may take on this node.

    Raises:
        ExportError, ValueError: a model cannot be loaded.
    """

    def __init__(
        self,
        models: Sequence[ModelSpec],
        limits: Limits | None = None,
        watch_s: float = 0.0,
        log: LogConfig | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.limits, self.measures = limits or Limits(), Measures()
        self._models: dict[str, list[tuple[float, Versions]]] = {}
        self._shadows: dict[str, list[tuple[float, Versions]]] = {}
        for spec in models:
            versions = Versions(spec.folder, self.limits, self._on_change(spec.name), cache_bytes)
            of = self._shadows if spec.shadow else self._models
            of.setdefault(spec.name, []).append((spec.share, versions))
        self._behind: list[Shadows | FeatureLog] = [Shadows(self._shadows, self.measures)] if self._shadows else []
        if log is not None:
            self._behind.append(FeatureLog(log, self.measures))
        self.default = models[0].name if models else ""
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
        return self.begin(lambda loaded: loaded.reader.read(body, content_type), Target(model=model))

    def begin(self, read: Callable[[Loaded], Query], target: Target) -> ScoreRequest:
        """As `read`, of a body in any protocol.

        Raises:
            BadRequest: as there; or the version is none that answers.
        """
        begin = time.perf_counter()
        name, loaded = self.find(target)
        return ScoreRequest(name, loaded, read(loaded), begin, target.id)

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
            scores = loaded.model.outputs(batch, context)
        except ValueError as error:
            raise BadRequest(422, str(error)) from error
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
        for behind in self._behind:
            behind.offer(requests, answers)
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
                    "shadow": shadow,
                    "warnings": versions.active.model.warnings,
                    "refused": dict(versions.refused),
                }
                for shadow, models in ((False, self._models), (True, self._shadows))
                for name, of in models.items()
                for share, versions in of
            ],
        }

    def schema(self, model: str | None = None) -> dict[str, Any]:
        """What a request for a model must hold."""
        name, loaded = self.find(Target(model=model))
        schema = loaded.reader.schema
        return {
            "model": name,
            "version": loaded.version,
            "labels": list(loaded.model.labels),
            "label_kinds": list(loaded.model.index.inputs.kinds or ["binary"] * len(loaded.model.labels)),
            "derived": [spec.model_dump(mode="json") for spec in schema.derived],
            "column_types": schema.column_types,
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
        """Ends the watch, the shadows and the log."""
        self._closing.set()
        for behind in self._behind:
            behind.close()

    def _all(self) -> list[tuple[str, Versions]]:
        both = (*self._models.items(), *self._shadows.items())
        return [(name, versions) for name, of in both for _, versions in of]

    def find(self, target: Target) -> tuple[str, Loaded]:
        """A model's name and the version that answers.

        Raises:
            BadRequest: there is none.
        """
        name = target.model or self.default
        found = self._models.get(name)
        if found is None:
            if not self._models:
                raise BadRequest(404, "this service has no model that scores; POST /retrieve asks its index")
            raise BadRequest(404, f"there is no model {name!r}; there are {', '.join(self._models)}")
        if target.version is not None:
            for _, versions in found:
                if versions.active.version == target.version:
                    return name, versions.active
            there = ", ".join(versions.active.version for _, versions in found)
            raise BadRequest(404, f"model {name!r} has no version {target.version!r} that answers, but {there}")
        if len(found) == 1:
            return name, found[0][1].active  # taken once: a request has one version from beginning to end
        drawn = random.random() if target.key is None else place_of(f"{name} {target.key}")
        return name, by_share(found, drawn).active

    def _on_change(self, name: str) -> Any:
        def record(outcome: str, version: str, what: str) -> None:
            self.measures.version(name, outcome)
            audit.info("%s", json.dumps({"model": name, "outcome": outcome, "version": version, "what": what}))
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
