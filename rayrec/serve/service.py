"""`Service`: models by name, their versions, and the shares of the requests. Independent of HTTP and Ray."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec.serve.config import LogConfig, ModelSpec
from rayrec.serve.errors import RequestError, not_finite
from rayrec.serve.feature_log import FeatureLog
from rayrec.serve.limits import Limits
from rayrec.serve.metrics import ServiceMetrics
from rayrec.serve.requests import Query
from rayrec.serve.retrieval import Retrieval
from rayrec.serve.routing import Answer, ScoreRequest, Target, by_share, unit_hash
from rayrec.serve.versions import Loaded, Versions, load
from rayrec.storage.cache import CACHE_BYTES

INDEX_NAME = "/retrieve"  # of the index in metrics and the audit log; no model's name has a slash
audit = logging.getLogger("rayrec.serve.audit")  # a line for each version that was loaded or refused


def freeze_garbage() -> None:
    """Excludes all current objects (mostly of torch) from garbage collection.

    A full collection would otherwise run every few hundred requests with many lists, and stop all requests for 0.2 s.
    """
    gc.collect()
    gc.freeze()


class Service:
    """Scores requests, and replaces versions meanwhile.

    Args:
        models: The first is the default.
        watch_s: Interval between checks for newer versions, in seconds; 0: never.
        log: Log of requests and scores; None: no log.
        cache_bytes: Disk space on this node for copies of exports from object storage.
        index: An export with an index of items, or a folder of exports, for `retrieval`; a path or URI.

    Attributes:
        retrieval: Answers `/retrieve`; None without an index.

    Raises:
        ExportError, ValueError: A model or the index cannot be loaded.
    """

    def __init__(
        self,
        models: Sequence[ModelSpec],
        limits: Limits | None = None,
        watch_s: float = 0.0,
        log: LogConfig | None = None,
        cache_bytes: int = CACHE_BYTES,
        index: Path | str | None = None,
    ) -> None:
        self.limits, self.stats = limits or Limits(), ServiceMetrics()
        self._models: dict[str, list[tuple[float, Versions[Loaded]]]] = {}
        for spec in models:
            load_version = partial(load, limits=self.limits)
            versions = Versions(spec.folder, load_version, self._on_change(spec.name), cache_bytes)
            self._models.setdefault(spec.name, []).append((spec.share, versions))
        self._feature_log = None if log is None else FeatureLog(log, self.stats)
        self.default = models[0].name if models else ""
        self.events: list[tuple[str, str, str, str]] = []
        self.retrieval: Retrieval | None = None
        if index is not None:
            self.retrieval = Retrieval(index, self.limits, self._on_change(INDEX_NAME), cache_bytes)
        self._closing = threading.Event()
        if watch_s:
            threading.Thread(target=self._watch, args=(watch_s,), daemon=True, name="rayrec-watch").start()

    def score(self, body: bytes, content_type: str, model: str | None = None) -> Answer:
        """
        Raises:
            RequestError: The request is wrong.
        """
        (answer,) = self.answers([self.read(body, content_type, model)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self, body: bytes, content_type: str, model: str | None = None) -> ScoreRequest:
        """Parses a request and selects the version that will score it.

        Raises:
            RequestError: The body cannot be parsed, or the model is unknown.
        """
        return self.begin(lambda loaded: loaded.reader.read(body, content_type), Target(model=model))

    def begin(self, read: Callable[[Loaded], Query], target: Target) -> ScoreRequest:
        """Like `read`, for any protocol: `read` parses the request.

        Raises:
            RequestError: As `read`, or the version is not active.
        """
        begin = time.perf_counter()
        name, loaded = self.find(target)
        return ScoreRequest(name, loaded, read(loaded), begin, target.id)

    def answers(self, requests: Sequence[ScoreRequest]) -> list[Answer | Exception]:
        """Scores requests as one batch; wrong requests are left out and get an error.

        Whatever fails, only the requests that fail by themselves get an error.

        Args:
            requests: Of one version and one form.
        """
        if not requests:
            return []
        try:
            return list(self._answers(requests))
        except Exception as error:
            if len(requests) == 1:
                return [error]
            suspects = error.queries if isinstance(error, RequestError) else frozenset()
            errors = _mapping_errors(requests, suspects) or _mapping_errors(requests, range(len(requests)))
        if not errors:  # together they exceed a limit, or scoring fails
            return [answer for request in requests for answer in self.answers([request])]
        answers = iter(self.answers([request for index, request in enumerate(requests) if index not in errors]))
        return [errors[index] if index in errors else next(answers) for index in range(len(requests))]

    def _answers(self, requests: Sequence[ScoreRequest]) -> list[Answer | Exception]:
        begin, name, loaded = time.perf_counter(), requests[0].name, requests[0].loaded
        mapped = loaded.reader.map([request.query for request in requests])
        batch, context = mapped.batch, mapped.shared
        try:
            scores = loaded.model.outputs(batch, context)
        except ValueError as error:
            raise RequestError(422, str(error)) from error
        now = time.perf_counter()
        loaded.pace.observe(batch.rows, now - begin)
        for sparse in (batch.sparse, context):
            if sparse is not None:
                self.stats.ids(name, loaded.reader.schema, sparse)
        finite = np.logical_and.reduce([np.isfinite(values) for values in scores.values()])
        good_scores = scores if finite.all() else {label: values[finite] for label, values in scores.items()}
        self.stats.scores(name, loaded.version, good_scores, loaded.quantiles)
        self.stats.batch(name, len(requests))
        answers, stop = list[Answer | Exception](), 0
        for request in requests:
            start, stop = stop, stop + request.query.size
            self.stats.scored(name, loaded.version, request.query.size, now - request.begin)
            if not finite[start:stop].all():
                answers.append(not_finite(finite[start:stop]))
                continue
            request_scores = {label: values[start:stop] for label, values in scores.items()}
            answers.append(Answer(name, loaded.version, request_scores))
        if self._feature_log is not None:
            self._feature_log.offer(requests, answers, mapped)
        return answers

    def retrieve(self, retrieval: Retrieval, body: bytes, id: str) -> bytes:
        """Answers a request for items, and logs those that were ranked.

        Args:
            id: Of the request.

        Raises:
            RequestError: The request is wrong.
        """
        if self._feature_log is None:
            return retrieval.answer(body)
        return retrieval.answer(body, partial(self._feature_log.offer_ranked, INDEX_NAME, id))

    @property
    def names(self) -> frozenset[str]:
        """Names of all models."""
        return frozenset(self._models)

    def refresh(self) -> int:
        """Checks for newer versions now; returns how many were loaded."""
        index = 0 if self.retrieval is None else int(self.retrieval.versions.refresh())
        return index + sum(versions.refresh() for _, _, versions in self._entries())

    def health(self, details: bool = True) -> dict[str, Any]:
        """This process, its cores, and for each model: version, folder, share, warnings, and refused versions with the
        reason.

        Args:
            details: False for anyone: of models, names and versions only.
        """
        models = []
        for name, share, versions in self._entries():
            active = versions.active
            entry: dict[str, Any] = {"name": name, "version": active.version}
            if details:
                trained_to = active.model.index.trained_to
                if trained_to is not None:
                    entry["freshness_seconds"] = round(max(0.0, time.time() - trained_to), 3)
                entry |= {"folder": str(active.folder), "share": share, "warnings": active.model.warnings}
                entry["refused"] = dict(versions.refused)
            models.append(entry)
        health = {"status": "ok", "pid": os.getpid(), "cores": torch.get_num_threads(), "models": models}
        if self.retrieval is not None:
            health["index"] = self.retrieval.health(details)
        return health

    def schema(self, model: str | None = None) -> dict[str, Any]:
        """What a request for a model must contain: `columns` lists all columns, and features say how they are read."""
        name, loaded = self.find(Target(model=model))
        schema = loaded.reader.schema
        return {
            "model": name,
            "version": loaded.version,
            "labels": list(loaded.model.labels),
            "label_kinds": list(loaded.model.index.inputs.kinds or ["binary"] * len(loaded.model.labels)),
            "derived": [spec.model_dump(mode="json") for spec in schema.derived],
            "columns": schema.feature_columns,
            "column_types": schema.column_types,
            "dense": [feature.model_dump(mode="json") for feature in schema.dense],
            "sparse": [feature.model_dump(mode="json", exclude={"mapping": {"path"}}) for feature in schema.sparse],
            "sequences": [sequence.model_dump(mode="json") for sequence in schema.sequences],
            "limits": self.limits.model_dump(include={"rows", "body_bytes", "ids", "queue"}),
        }

    def metrics(self) -> bytes:
        """Metrics in the Prometheus exposition format."""
        active = [(name, versions.active.version) for name, _, versions in self._entries()]
        for name, _, versions in self._entries():
            self.stats.fresh(name, versions.active.model.index.trained_to)
        index = [] if self.retrieval is None else [(INDEX_NAME, self.retrieval.index.version)]
        return self.stats.text([*active, *index])

    def close(self) -> None:
        """Ends the watch, and writes and closes the feature log."""
        self._closing.set()
        if self._feature_log is not None:
            self._feature_log.close()

    def _entries(self) -> list[tuple[str, float, Versions[Loaded]]]:
        return [(name, share, versions) for name, entries in self._models.items() for share, versions in entries]

    def find(self, target: Target) -> tuple[str, Loaded]:
        """The model's name and the version that will answer.

        Raises:
            RequestError: The model is unknown, or the version is not active.
        """
        name = target.model or self.default
        entries = self._models.get(name)
        if entries is None:
            if not self._models:
                raise RequestError(404, "this service has no ranking model; use POST /retrieve to query its index")
            raise RequestError(404, f"unknown model {name!r}; the service has {', '.join(self._models)}")
        if target.version is not None:
            for _, versions in entries:
                if versions.active.version == target.version:
                    return name, versions.active
            active = ", ".join(versions.active.version for _, versions in entries)
            raise RequestError(404, f"version {target.version!r} of model {name!r} is not active; {active} is")
        if len(entries) == 1:
            return name, entries[0][1].active  # read once: a request keeps one version until its end
        position = random.random() if target.key is None else unit_hash(f"{name} {target.key}")
        return name, by_share(entries, position).active

    def _on_change(self, name: str) -> Callable[[str, str, str], None]:
        def record(outcome: str, version: str, detail: str) -> None:
            self.stats.version(name, outcome)
            audit.info("%s", json.dumps({"model": name, "outcome": outcome, "version": version, "what": detail}))
            self.events.append((name, outcome, version, detail))
            del self.events[:-100]

        return record

    def _watch(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            self.refresh()


def _mapping_errors(requests: Sequence[ScoreRequest], indices: Iterable[int]) -> dict[int, Exception]:
    """The errors of requests that cannot be mapped by themselves, by index. Nothing is scored."""
    errors: dict[int, Exception] = {}
    for index in sorted(indices):
        try:
            requests[index].loaded.reader.batch([requests[index].query])
        except Exception as error:
            errors[index] = error
    return errors
