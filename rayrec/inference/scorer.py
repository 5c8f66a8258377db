"""`Scorer`: raw rows to probabilities, with the mapping of training."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayrec.data import DataError, Mapping, Schema
from rayrec.inference.artifact import ExportError
from rayrec.inference.model import Model

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of n rows.

    Args:
        probabilities: label → float32 [n]; NaN for rows that cannot be mapped.
        errors: row → error.
    """

    probabilities: dict[str, F32]
    errors: Dict[int, DataError]


class Scorer:
    """A model with its mapping. Thread-safe.

    Raises:
        ExportError: The export is a query tower.
        DataError, ValueError: The mapping of the export is damaged.
    """

    def __init__(self, model: Model) -> None:
        if model.index.inputs.query is not None:
            raise ExportError(
                f"{model.folder} is a query tower, which does not score rows: use `rayrec retrieve`, or `rayrec serve "
                "--index`"
            )
        self.model = model
        self.mapping = Mapping.from_config(model.mapping_config(), labels=False)

    @property
    def schema(self) -> Schema:
        """The schema of training rows, without labels."""
        return self.mapping.schema

    def score(self, rows: Tabular) -> Scores:
        """
        Args:
            rows: Raw values: an Arrow table, a dict of columns, or a list of dicts.

        Raises:
            DataError: A column is missing or has the wrong type.
        """
        batch, errors = self.mapping.to_batch_and_errors(rows)
        probabilities = self.model.outputs(batch)
        for values in probabilities.values():
            values[list(errors)] = np.nan
        return Scores(probabilities, errors)


def features_only(schema: Schema) -> Schema:
    """The schema without labels, weights, groups and times."""
    removed: dict[str, Any] = {"label": None, "labels": [], "sample_weight": None, "group": None, "timestamp": None}
    return schema.model_copy(update=removed)
