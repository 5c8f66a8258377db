"""What passes through a service: targets, requests, answers; and which version gets which share of them."""

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
    """The scores of a request: label → float32 [n]."""

    model: str
    version: str
    scores: dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request asks of.

    Args:
        model: None: the service's first.
        version: which must be one that answers now; None: any.
        key: requests of one key are answered by one version, as long as the shares are the same.
        id: of the request, in answers and logs.
    """

    model: str | None = None
    version: str | None = None
    key: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request on its way: its model, the version that answers it, what was read, when it came, and its id."""

    name: str
    loaded: Loaded
    query: Query
    begin: float
    id: str = ""


def place_of(text: str) -> float:
    """A number in [0, 1), the same for one text in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 2**56


def by_share(of: Sequence[tuple[float, T]], place: float) -> T:
    """The one whose share of all holds a place in [0, 1)."""
    left = place * sum(share for share, _ in of)
    for share, one in of:
        left -= share
        if left < 0:
            return one
    return of[-1][1]


def request_id(given: str) -> str:
    """The id that a client gave, where it is short and printable; else a new one."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
