"""What one request may cost, and how many may wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayrec.data.strict import Strict
from rayrec.serve.errors import BadRequest

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Strict):
    """Against those who send too much or never end.

    Args:
        body_bytes: of a request's body.
        rows: rows, or candidates.
        ids: of all its lists together, as they are looked up: a context's once, or for every candidate.
        body_s: seconds until its body must be there.
        queue: requests that wait or are scored at once, in a replica.
        batch_ms: that several requests scored together are planned to take at most.
    """

    body_bytes: Count = 8 << 20
    rows: Count = 10_000
    ids: Count = 2_000_000
    body_s: Positive = 10.0
    queue: Count = 128
    batch_ms: Positive = 20.0

    def check_rows(self, count: int) -> None:
        """
        Raises:
            BadRequest: too many, or none.
        """
        if count == 0:
            raise BadRequest(422, "there are no rows; give at least one")
        if count > self.rows:
            raise BadRequest(413, f"{count:,} rows are more than the {self.rows:,} of a request; send several requests")

    def check_ids(self, count: int) -> None:
        """
        Raises:
            BadRequest: too many.
        """
        if count > self.ids:
            text = f"{count:,} ids are more than the {self.ids:,} of a request; send shorter lists, fewer rows"
            raise BadRequest(413, text)
