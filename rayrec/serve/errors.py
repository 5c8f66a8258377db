"""Errors of requests: HTTP status, message and details."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Dict
from typing import Any


class BadRequest(Exception):
    """A request that is refused.

    Args:
        status: 4xx; 503 where the service has too much to do, 504 where a deadline passed.
        text: what is wrong, and the fix.
        errors: the rows at fault: feature, row, column, value, problem, fix.
        queries: places of the queries at fault, of several that were mapped together, as far as known.
    """

    def __init__(
        self, status: int, text: str, errors: Sequence[Dict[str, Any]] = (), queries: Iterable[int] = ()
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.errors, self.queries = status, text, list(errors), frozenset(queries)

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.text, **({"errors": self.errors} if self.errors else {})}


def json_of(body: bytes, **how: Any) -> Any:
    """What a body of JSON holds.

    Args:
        how: of `json.loads`.

    Raises:
        BadRequest: it holds none.
    """
    try:
        return json.loads(body, **how)
    except RecursionError:
        raise BadRequest(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(400, f"the body is no JSON: {str(error)[:300]}") from None
