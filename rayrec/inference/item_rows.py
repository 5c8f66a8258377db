"""`ItemRows`: table rows of item ids."""

from __future__ import annotations

import pyarrow as pa
import torch

from rayrec.data import Dynamic, Identity, Mapping, Vocabulary


class ItemRows:
    """Table rows of ids, as the mapping of a feature gives them.

    Args:
        mapping: Has the feature.
    """

    def __init__(self, mapping: Mapping, feature: str) -> None:
        sparse = next(sparse for sparse in mapping.schema.sparse if sparse.name == feature)
        scalar = sparse.model_copy(update={"kind": "id", "column": "id", "max_length": None})
        if isinstance(scalar.mapping, Dynamic):  # an id without a row of its own is left out
            rule = scalar.mapping.model_copy(update={"unseen": "zero"})
            scalar = scalar.model_copy(update={"mapping": rule})
        schema = mapping.schema.model_copy(update={"sparse": [scalar], "dense": [], "sequences": []})
        self._rule, self._mapping = scalar.mapping, Mapping(schema, mapping.rows_of, labels=False)

    def __call__(self, ids: pa.Array | pa.ChunkedArray) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns:
            rows `[n]`, -1 for ids that the mapping refuses or drops; bool `[n]`, False for ids that have no row of
            their own, because they are outside of the vocabulary or of the table's rows.

        Raises:
            DataError: The ids have another type than in training.
        """
        batch, errors = self._mapping.to_batch_and_errors(pa.table({"id": ids}))
        rows = torch.full((len(ids),), -1)
        rows[batch.sparse.lengths() > 0] = batch.sparse.values().long()
        rows[list(errors)] = -1
        known = rows >= 0
        if isinstance(self._rule, Vocabulary):
            known &= rows >= self._rule.oov_rows
        elif isinstance(self._rule, Identity):
            known &= torch.from_numpy(rows.numpy() == ids.to_numpy(zero_copy_only=False))
        return rows, known
