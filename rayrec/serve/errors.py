"""Errors of requests: HTTP status, message and details."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: 4xx if the request is at fault, 503 if the service is overloaded, 504 if a deadline passed.
        text: The problem and the fix.
        errors: The rows at fault, each with feature, row, column, value, problem and fix.
        queries: Indices of the queries that are probably at fault, among several mapped in one batch.
    """

    def __init__(
        self, status: int, text: str, errors: Sequence[Mapping[str, Any]] = (), queries: Iterable[int] = ()
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.errors, self.queries = status, text, list(errors), frozenset(queries)

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.text, **({"errors": self.errors} if self.errors else {})}


def not_finite(finite: npt.NDArray[np.bool_]) -> RequestError:
    """The error of a request with scores that are no numbers; JSON has none for them.

    Args:
        finite: By row.
    """
    row = int(np.flatnonzero(~finite)[0])
    count = f"{int((~finite).sum())} of {len(finite)} rows cannot be scored; "
    text = f"row {row}: the score is not finite; are its numbers far outside those of the training data?"
    return RequestError(422, count + text)


def parse_json(body: bytes, **options: Any) -> Any:
    """Parses a JSON body; `options` go to `json.loads`.

    Raises:
        RequestError: The body is not valid JSON.
    """
    try:
        return json.loads(body, **options)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not valid JSON: {str(error)[:300]}") from None
