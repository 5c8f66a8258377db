"""Errors of requests: HTTP status, message and details."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from collections.abc import Sequence
from typing import Any


class BadRequest(Exception):
    """A request that is refused.

    Args:
        status: 4xx.
        text: what is wrong, and the fix.
        errors: the rows at fault: feature, row, column, value, problem, fix.
    """

    def __init__(self, status: int, text: str, errors: Sequence[Dict[str, Any]] = ()) -> None:
        super().__init__(text)
        self.status, self.text, self.errors = status, text, list(errors)

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.text, **({"errors": self.errors} if self.errors else {})}
