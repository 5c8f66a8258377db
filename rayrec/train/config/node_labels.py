"""Checks label selectors as Ray does, without importing Ray; and parses sizes."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import PydanticCustomError

_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:(?P<prefix>(?:{_VALUE})(?:\.(?:{_VALUE}))*)/)?{_VALUE}")
_CONDITION = re.compile(rf"!?(?:{_VALUE}|in\({_VALUE}(?:, ?{_VALUE})*\))")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B)")
_SCALES = {"K": 1, "M": 2, "G": 3, "T": 4}


def is_label_key(key: str) -> bool:
    """Whether `key` is the name of a node label: `name` or `prefix/name`."""
    match = _KEY.fullmatch(key)
    return match is not None and len(match["prefix"] or "") <= 253


def is_label_condition(value: str) -> bool:
    """Whether `value` is a condition of a label selector: `a`, `!a`, `in(a, b)` or `!in(a, b)`."""
    return _CONDITION.fullmatch(value) is not None


def parse_size(value: Any) -> Any:
    """The bytes for `"64GB"` or `"60GiB"`; numbers are returned as they are.

    Raises:
        PydanticCustomError: another text.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise PydanticCustomError("size", "Input should be a size, e.g. 64GB or 60GiB, or a number of bytes")
    return int(float(match[1]) * (1024 if "i" in match[2] else 1000) ** _SCALES[match[2][0]])
