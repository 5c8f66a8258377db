"""Requests and answers of a service, and how the versions of a model share its requests."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rayrec.serve.requests import Query
from rayrec.serve.versions import Loaded

T = TypeVar("T")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The scores of a request: label → float32 [rows]."""

    model: str
    version: str
    scores: dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model and version that a request asks for.

    Args:
        model: None selects the default model of the service.
        version: Must be active; None accepts any.
        key: Requests with the same key get the same version while the shares stay the same.
        id: Request id, used in answers and logs.
    """

    model: str | None = None
    version: str | None = None
    key: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A parsed request and the version that will score it.

    Args:
        begin: `time.perf_counter()` at arrival.
    """

    name: str
    loaded: Loaded
    query: Query
    begin: float
    id: str = ""


def unit_hash(text: str) -> float:
    """Hashes a text to a number in [0, 1), equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56


def by_share(entries: Sequence[tuple[float, T]], position: float) -> T:
    """Selects an entry by its share.

    Args:
        entries: (share, entry); shares are relative to their sum.
        position: In [0, 1).
    """
    remaining = position * sum(share for share, _ in entries)
    for share, entry in entries:
        remaining -= share
        if remaining < 0:
            return entry
    return entries[-1][1]


def request_id(client_id: str) -> str:
    """The id that the client sent if it is short and printable, else a new one."""
    return client_id if _ID.fullmatch(client_id) else uuid.uuid4().hex
