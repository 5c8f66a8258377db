"""`Scorer`: raw rows to probabilities, through the mapping that the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayrec.data import DataError, Mapping, Schema
from rayrec.inference.model import Model

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of n rows.

    Args:
        probabilities: label → float32 [n]; NaN for rows that cannot be used.
        errors: row → what is wrong with it.
    """

    probabilities: dict[str, F32]
    errors: Dict[int, DataError]


class Scorer:
    """A model with its mapping. Threads may share one.

    Raises:
        DataError, ValueError: the folder's mapping is damaged.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.mapping = Mapping.from_config(model.mapping_config(), labels=False)

    @property
    def schema(self) -> Schema:
        """Of the training rows."""
        return self.mapping.schema

    def score(self, rows: Tabular) -> Scores:
        """
        Args:
            rows: raw values: an Arrow table, a dict of columns, a list of dicts.

        Raises:
            DataError: a missing column or a wrong type, which concerns all rows.
        """
        batch, errors = self.mapping.to_batch_and_errors(rows)
        probabilities = self.model.outputs(batch)
        for values in probabilities.values():
            values[list(errors)] = np.nan
        return Scores(probabilities, errors)


def features_only(schema: Schema) -> Schema:
    """The schema of rows that have no labels and nothing that belongs to them."""
    nothing: dict[str, Any] = {"label": None, "labels": [], "sample_weight": None, "group": None, "timestamp": None}
    return schema.model_copy(update=nothing)
