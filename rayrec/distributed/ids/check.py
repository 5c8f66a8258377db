"""Whether a batch may be looked up, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor


class IdCheck:
    """Checks features, weights and ids of a batch against the tables that read them.

    Args:
        tables: of the collection.
        weighted: ids must carry weights.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], weighted: bool) -> None:
        self._weighted = weighted
        self._table_of: dict[str, BaseEmbeddingConfig] = {}  # the smallest that reads the feature
        for table in tables:
            for feature in table.feature_names:
                held = self._table_of.get(feature)
                if held is None or table.num_embeddings < held.num_embeddings:
                    self._table_of[feature] = table
        self._limits: dict[tuple[str, ...], torch.Tensor] = {}
        sizes = {table.num_embeddings for table in self._table_of.values()}
        self._rows_of_all = sizes.pop() if len(sizes) == 1 else None

    def problem(self, kjt: KeyedJaggedTensor) -> ValueError | None:
        """What is wrong with the batch, with feature, id and table; None where nothing is."""
        keys = tuple(kjt.keys())
        if keys not in self._limits:
            missing = [feature for feature in self._table_of if feature not in kjt.index_per_key()]
            if missing:
                return ValueError(f"the input has no feature {missing[0]!r}, which a table reads; it has {kjt.keys()}")
            most = torch.iinfo(torch.int64).max
            rows = [self._table_of[key].num_embeddings if key in self._table_of else most for key in keys]
            self._limits[keys] = torch.tensor(rows, dtype=torch.int64, device=kjt.device())
        if self._weighted and kjt.weights_or_none() is None:
            return ValueError("the collection is weighted, but the input has no weights")
        values = kjt.values()
        if values.dtype not in (torch.int64, torch.int32):
            return ValueError(f"ids are {values.dtype}; int64 or int32 is needed")
        if values.numel() == 0 or self._inside(kjt, self._limits[keys]):
            return None
        return next(error for feature in self._table_of if (error := self._range_error(kjt, feature)))

    def _inside(self, kjt: KeyedJaggedTensor, limits: torch.Tensor) -> bool:
        values = kjt.values()
        if self._rows_of_all is not None:
            least, greatest = (int(end) for end in values.aminmax())
            if least >= 0 and greatest < self._rows_of_all:
                return True
        counts = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
        most = limits.repeat_interleave(counts, output_size=values.numel())
        outside = (values >= most) | (values < 0)
        if len(self._table_of) < len(kjt.keys()):  # ids of features that no table reads are not ours to judge
            outside &= most < torch.iinfo(torch.int64).max
        return not bool(outside.any())

    def _range_error(self, kjt: KeyedJaggedTensor, feature: str) -> ValueError | None:
        table = self._table_of[feature]
        ids = kjt[feature].values()
        bad = ids[(ids < 0) | (ids >= table.num_embeddings)]
        if not bad.numel():
            return None
        return ValueError(
            f"feature {feature!r}: id {int(bad[0])} is outside the rows [0, {table.num_embeddings}) of table "
            f"{table.name!r}; map ids to rows (for example by hash) or give the table more rows"
        )

    def nothing(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """A batch of no examples with every feature, to take part in the exchange that spreads an error."""
        values = kjt.values().new_empty(0, dtype=torch.int64)
        return KeyedJaggedTensor(
            keys=list(self._table_of),
            values=values,
            weights=values.new_empty(0, dtype=torch.float32) if self._weighted else None,
            lengths=values.new_empty(0),
            stride=0,
        )
