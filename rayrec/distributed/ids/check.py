"""Checks a batch against the tables that read it, before its ids are sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from rayrec.distributed.ids.compiled_split import outside_rows, split_loops
from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

_ANY = torch.iinfo(torch.int64).max


class IdCheck:
    """Checks features, weights and ids of a batch against the tables that read them.

    Args:
        tables: of the collection.
        weighted: ids must carry weights.
        checked: features whose ids are compared with their tables' rows elsewhere.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], weighted: bool, checked: Collection[str] = frozenset()
    ) -> None:
        self._weighted = weighted
        self._features = list(dict.fromkeys(feature for table in tables for feature in table.feature_names))
        self._table_of: dict[str, BaseEmbeddingConfig] = {}  # the smallest that reads the feature
        for table in tables:
            for feature in table.feature_names:
                held = self._table_of.get(feature)
                if feature not in checked and (held is None or table.num_embeddings < held.num_embeddings):
                    self._table_of[feature] = table
        self._limits: dict[tuple[str, ...], torch.Tensor] = {}
        sizes = {table.num_embeddings for table in self._table_of.values()}
        self._rows_of_all = sizes.pop() if len(sizes) == 1 else None
        self._loops = split_loops() if sizes else None

    def check(self, kjt: KeyedJaggedTensor) -> None:
        """Raises ValueError for a batch that cannot be looked up, with feature, id and table."""
        keys, values = tuple(kjt.keys()), kjt.values()
        if keys not in self._limits:
            missing = [feature for feature in self._features if feature not in kjt.index_per_key()]
            if missing:
                raise ValueError(f"the input has no feature {missing[0]!r}, which a table reads; it has {kjt.keys()}")
            rows = [self._table_of[key].num_embeddings if key in self._table_of else _ANY for key in keys]
            self._limits[keys] = torch.tensor(rows, dtype=torch.int64, device=values.device)
        if self._weighted and kjt.weights_or_none() is None:
            raise ValueError("the collection is weighted, but the input has no weights")
        if values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids are {values.dtype}; int64 or int32 is needed")
        counts = kjt.lengths().view(len(keys), kjt.stride()).sum(1)
        if int(counts.sum()) != values.numel():
            raise ValueError(f"the input's lengths add up to {int(counts.sum())}, but it has {values.numel()} ids")
        if values.numel() and self._table_of and not self._all_inside(kjt, self._limits[keys], counts):
            self._raise_for(kjt)

    def _all_inside(self, kjt: KeyedJaggedTensor, limit_K: torch.Tensor, count_K: torch.Tensor) -> bool:
        values = kjt.values()
        if self._rows_of_all is not None:
            least, greatest = values.aminmax()
            if int(least) >= 0 and int(greatest) < self._rows_of_all:
                return True
        if self._loops is not None:
            ids = values.to(torch.int64).contiguous().numpy().view(np.uint64)
            ends = np.array(kjt.offset_per_key())
            return not self._loops.any_outside(ids, ends, limit_K.numpy().view(np.uint64))
        most_N = limit_K.repeat_interleave(count_K, output_size=values.numel())
        outside = ((values >= most_N) | (values < 0)) & (most_N < _ANY)  # of other features any id will do
        return not bool(outside.any())

    def _raise_for(self, kjt: KeyedJaggedTensor) -> None:
        per_key = list(zip(kjt.keys(), kjt.values().split(kjt.length_per_key()), strict=True))
        for feature, table in self._table_of.items():
            for ids in (of_key for key, of_key in per_key if key == feature):
                bad = ids[(ids < 0) | (ids >= table.num_embeddings)]
                if bad.numel():
                    raise outside_rows(feature, int(bad[0]), table.num_embeddings, table.name)
