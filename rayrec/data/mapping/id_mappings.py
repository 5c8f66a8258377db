"""How ids become table rows, as the config says it; `sparse.py` does it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rayrec.data.storage.locations import secret_in
from rayrec.data.strict import Strict


class Identity(Strict):
    """The id is the table row.

    Args:
        bounds: what happens to an id outside `[0, rows)`: "error" reports it, "clip" takes the nearest row, "drop"
            leaves it out of its bag.
    """

    kind: Literal["identity"] = "identity"
    bounds: Literal["error", "clip", "drop"] = "error"


class Hash(Strict):
    """Integers and strings are hashed onto the table's rows; unequal ids may share one.

    Args:
        seed: another seed gives another hash.
    """

    kind: Literal["hash"] = "hash"
    seed: int = 0


class Vocabulary(Strict):
    """Every id of a vocabulary has a row of its own; all others share the first rows of the table.

    Args:
        path: Parquet file with a column `id`, or text with one id a line; a relative path starts from the config's
            folder. Its k-th id has row `oov_rows + k`.
        oov_rows: rows that ids outside the vocabulary are hashed onto; with 0 such an id is reported.
    """

    kind: Literal["vocabulary"] = "vocabulary"
    path: str
    oov_rows: int = Field(default=1, ge=0)

    @field_validator("path")
    @classmethod
    def _no_secret(cls, given: str) -> str:
        if (problem := secret_in(given)) is not None:
            raise ValueError(problem)
        return given


IdMapping = Annotated[Identity | Hash | Vocabulary, Field(discriminator="kind")]
