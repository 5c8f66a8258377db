"""What one request may cost, and how many may wait."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.serve.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Against those who send too much or never end.

    Args:
        body_bytes: of a request's body.
        rows: rows, or candidates.
        ids: of all its lists together, as they are looked up: a context's once, or for every candidate.
        body_s: seconds until its body must be there.
        queue: requests that wait or are scored at once, in a replica.
    """

    body_bytes: int = 8 << 20
    rows: int = 10_000
    ids: int = 2_000_000
    body_s: float = 10.0
    queue: int = 128

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
