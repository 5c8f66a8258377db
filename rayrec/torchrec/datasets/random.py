"""Random batches, for tests of models and for benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import IterableDataset

from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.datasets.utils import Batch


class RandomRecDataset(IterableDataset[Batch]):
    """Random batches, generated once and returned repeatedly.

    Args:
        keys: names of the sparse features.
        batch_size: B.
        hash_size, hash_sizes: number of ids; one value for all features (default 100), or one per feature.
        ids_per_feature, ids_per_features: maximum number of ids per example; one value for all features (default 2),
            or one per feature.
        num_dense: N, number of dense features, normally distributed.
        manual_seed: the seed.
        num_batches: batches per pass; None: infinite.
        num_generated_batches: number of distinct batches; 0 or less: generate every batch.
        min_ids_per_feature, min_ids_per_features: minimum number of ids per example; default: 0 if you pass
            ids_per_features, else the maximum.

    Raises:
        ValueError: a list with another length than `keys`.
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
        self._rows = self._per_key("hash_sizes", hash_size, hash_sizes, 100)
        self._max_ids = self._per_key("ids_per_features", ids_per_feature, ids_per_features, 2)
        self._min_ids = self._max_ids
        if ids_per_features is not None or min_ids_per_feature is not None or min_ids_per_features is not None:
            self._min_ids = self._per_key("min_ids_per_features", min_ids_per_feature, min_ids_per_features, 0)
        self._generator = torch.Generator()
        if manual_seed is not None:
            self._generator.manual_seed(manual_seed)
        else:
            self._generator.seed()
        self._batches = [self._generate() for _ in range(max(0, num_generated_batches))]

    def _per_key(self, name: str, value: int | None, values: Sequence[int] | None, default: int) -> list[int]:
        if value is not None and values is not None:
            raise ValueError(f"{name}: pass either one number for all keys, or a list")
        if values is None:
            return [default if value is None else value] * len(self.keys)
        if len(values) != len(self.keys):
            raise ValueError(f"{name} has {len(values)} numbers for {len(self.keys)} keys")
        return list(values)

    def _generate(self) -> Batch:
        generator = self._generator
        values, lengths = [], []
        for rows, min_ids, max_ids in zip(self._rows, self._min_ids, self._max_ids, strict=True):
            count = torch.randint(min_ids, max_ids + 1, (self.batch_size,), generator=generator, dtype=torch.int32)
            values.append(torch.randint(rows, (int(count.sum()),), generator=generator))
            lengths.append(count)
        sparse = KeyedJaggedTensor.from_lengths_sync(self.keys, torch.cat(values), torch.cat(lengths))
        dense = torch.randn(self.batch_size, self.num_dense, generator=generator)
        return Batch(dense, sparse, torch.randint(2, (self.batch_size,), generator=generator))

    def __iter__(self) -> Iterator[Batch]:
        batches = itertools.cycle(self._batches) if self._batches else iter(self._generate, None)
        return itertools.islice(batches, self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the data set is infinite; pass num_batches")
        return self.num_batches
