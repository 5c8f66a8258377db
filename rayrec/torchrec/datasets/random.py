"""Batches of drawn numbers, for trying a model and for benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import IterableDataset

from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.datasets.utils import Batch


class RandomRecDataset(IterableDataset[Batch]):
    """Batches drawn once and handed out in turn, without end or `num_batches` in all.

    Args:
        keys: names of the sparse features.
        batch_size: B.
        hash_size, hash_sizes: ids are below it; one number for all features (default 100), or one for each.
        ids_per_feature, ids_per_features: most ids of an example; for all (default 2) or each.
        num_dense: N, dense features, normal.
        manual_seed: of the numbers.
        num_batches: of one pass; None: without end.
        num_generated_batches: how many are drawn; 0 or less: every batch is drawn anew.
        min_ids_per_feature, min_ids_per_features: fewest ids of an example; by default 0 where ids_per_features is
            given, else all examples have equally many.

    Raises:
        ValueError: a list that has not one number for each key.
    """

    def __init__(
        self,
        keys: Sequence[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: Sequence[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: Sequence[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.keys, self.batch_size, self.num_dense, self.num_batches = list(keys), batch_size, num_dense, num_batches
        self._rows = self._each("hash_sizes", hash_size, hash_sizes, 100)
        self._most = self._each("ids_per_features", ids_per_feature, ids_per_features, 2)
        self._least = self._most
        if ids_per_features is not None or min_ids_per_feature is not None or min_ids_per_features is not None:
            self._least = self._each("min_ids_per_features", min_ids_per_feature, min_ids_per_features, 0)
        self._generator = torch.Generator()
        if manual_seed is not None:
            self._generator.manual_seed(manual_seed)
        else:
            self._generator.seed()
        self._drawn = [self._draw() for _ in range(max(0, num_generated_batches))]

    def _each(self, name: str, one: int | None, several: Sequence[int] | None, default: int) -> list[int]:
        if one is not None and several is not None:
            raise ValueError(f"{name}: give one number for all keys, or a list, not both")
        if several is None:
            return [default if one is None else one] * len(self.keys)
        if len(several) != len(self.keys):
            raise ValueError(f"{name} has {len(several)} numbers for {len(self.keys)} keys")
        return list(several)

    def _draw(self) -> Batch:
        numbers = self._generator
        values, lengths = [], []
        for rows, least, most in zip(self._rows, self._least, self._most, strict=True):
            count = torch.randint(least, most + 1, (self.batch_size,), generator=numbers, dtype=torch.int32)
            values.append(torch.randint(rows, (int(count.sum()),), generator=numbers))
            lengths.append(count)
        sparse = KeyedJaggedTensor.from_lengths_sync(self.keys, torch.cat(values), torch.cat(lengths))
        dense = torch.randn(self.batch_size, self.num_dense, generator=numbers)
        return Batch(dense, sparse, torch.randint(2, (self.batch_size,), generator=numbers))

    def __iter__(self) -> Iterator[Batch]:
        batches = itertools.cycle(self._drawn) if self._drawn else iter(self._draw, None)
        return itertools.islice(batches, self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the data set has no end; give num_batches")
        return self.num_batches
