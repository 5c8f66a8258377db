"""What a pretended GPU has seen."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Book:
    """Everything seen; operators, copies and collectives only while `on`, mistakes always."""

    def __init__(self) -> None:
        self._counts, self._quiet = False, threading.local()
        self.strict, self.stage = False, "build"
        self.mismatches: Counter[str] = Counter()
        self.host_groups: set[str] = set()  # that exchange CPU tensors
        self.inner_groups: set[str] = set()  # of the ranks of one host
        self.roots: list[str] = []  # package folders, the one under test first
        self.clear()

    @property
    def on(self) -> bool:
        return self._counts and not getattr(self._quiet, "here", False)

    @on.setter
    def on(self, counts: bool) -> None:
        self._counts = counts

    @contextmanager
    def quiet(self, whether: bool) -> Iterator[None]:
        """Does not count what this thread does meanwhile; the others' is counted."""
        before, self._quiet.here = getattr(self._quiet, "here", False), whether or getattr(self._quiet, "here", False)
        try:
            yield
        finally:
            self._quiet.here = before

    def clear(self) -> None:
        self.operators: Counter[tuple[str, str, str]] = Counter()  # (stage, operator, place)
        self.syncs: Counter[tuple[str, str]] = Counter()  # (kind, place)
        self.copies: Counter[tuple[str, str]] = Counter()  # without a wait
        self.collectives: Counter[tuple[str, str]] = Counter()  # (name and link, stage)
        self.sent_bytes: Counter[tuple[str, str]] = Counter()  # by this rank to others
        self.simulation_s, self.crossings = 0.0, 0

    def mismatch(self, what: str) -> None:
        """Something that CUDA or NCCL would refuse."""
        self.mismatches[what] += 1
        if self.strict:
            raise RuntimeError(f"on a GPU this fails: {what}")

    def sync(self, kind: str) -> None:
        """The host waits for the device."""
        if self.on:
            self.syncs[kind, self.place()] += 1

    def copy(self, kind: str) -> None:
        if self.on:
            self.copies[kind, self.place()] += 1

    def operator(self, name: str) -> None:
        if self.on:
            self.operators[self.stage, name, self.place()] += 1

    def place(self) -> str:
        """file:line of the innermost frame in the packages under test; with the caller outside fbgemm."""
        frame, first = sys._getframe(1), None
        while frame is not None:
            name = frame.f_code.co_filename
            for root in self.roots:
                if name.startswith(root):
                    at = f"{os.path.basename(root.rstrip('/'))}/{name[len(root) :]}:{frame.f_lineno}"
                    if root is self.roots[0]:
                        return at if first is None else f"{first} <- {at}"
                    first = first or at
            frame = frame.f_back  # type: ignore[assignment]
        return first or "(torch)"


BOOK = Book()
