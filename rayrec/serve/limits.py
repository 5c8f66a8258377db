"""Limits on the size of a request and on the queue of a replica."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayrec._runtime.strict import Strict
from rayrec.serve.errors import RequestError

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Strict):
    """Limits of a replica."""

    body_bytes: Count = 8 << 20
    """Bytes of a request's body."""
    rows: Count = 10_000
    """Rows, or candidates, of a request."""
    ids: Count = 2_000_000
    """Ids that a request looks up. Ids of a context count once if the model looks them up once, else per candidate."""
    body_s: Positive = 10.0
    """Seconds until the whole body must have arrived."""
    queue: Count = 128
    """Requests that wait or are being scored, per replica."""
    batch_ms: Positive = 20.0
    """Expected duration of a batch of several requests, in milliseconds."""

    @property
    def decoded_bytes(self) -> int:
        """Bytes of a request's values once they are decoded: as large as those of bodies of one byte for each value."""
        return 8 * self.body_bytes

    def check_rows(self, count: int) -> None:
        """
        Raises:
            RequestError: The request has no rows, or too many.
        """
        if count == 0:
            raise RequestError(422, "the request has no rows; send at least one")
        if count > self.rows:
            raise RequestError(413, f"{count:,} rows exceed the limit of {self.rows:,} per request; split the request")

    def check_decoded(self, size: int) -> None:
        """
        Raises:
            RequestError: The decoded values are too large.
        """
        if size > self.decoded_bytes:
            text = f"the values would take {size:,} bytes once they are decoded, at most {self.decoded_bytes:,}"
            raise RequestError(413, f"{text} (8 × limits.body_bytes); send shorter lists and texts, or fewer rows")

    def check_ids(self, count: int) -> None:
        """
        Raises:
            RequestError: There are too many ids.
        """
        if count > self.ids:
            text = f"{count:,} ids exceed the limit of {self.ids:,} per request; send shorter lists or fewer rows"
            raise RequestError(413, text)
