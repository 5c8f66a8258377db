"""A collection's routes as arrays for the compiled loops: the feature of each variant, its row buckets, and the stream
that receives each bucket. Suffixes: F features, V variants, E row edges, S streams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rayrec.distributed.ids.routes import Routes
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.embedding import outside_rows
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class Buckets:
    """The row buckets of each variant.

    Args:
        routes: routes of the collection.

    Attributes:
        features: features of the routes.
        feature_V: index of each variant's feature.
        buckets_V: number of buckets; 1 for a variant that is not cut.
        block_V: rows of a bucket if all buckets have the same number (the last may have fewer); else 0.
        edges_VE: row edges of the buckets, padded with the last edge.
        stream_VE: stream of each bucket.
        repeated: pairs of streams with equal contents.
        num_streams: number of streams that ranks receive.
        num_unread: number of further streams, which no rank receives: their rows are also in a bucket of another
            variant on the same rank.
        key_indices: returns the index of each feature among the keys of a batch, cached.
    """

    def __init__(self, routes: Routes) -> None:
        self.features = routes.features
        feature = {name: number for number, name in enumerate(routes.features)}
        streams = [stream for route in routes.ranks for stream in route.streams]
        self.num_streams = len(streams)
        self._table_V = _smallest_tables(routes)
        edges = [
            variant.edges or (0, table.num_embeddings)
            for variant, table in zip(routes.variants, self._table_V, strict=True)
        ]
        width = max(map(len, edges), default=2)
        self.feature_V = np.array([feature[variant.feature] for variant in routes.variants], np.int64)
        self.buckets_V = np.array([len(edges_E) - 1 for edges_E in edges], np.int64)
        self.block_V = np.array([_block(edges_E) for edges_E in edges], dtype=np.uint64)
        self.edges_VE = np.array([[*e, *[e[-1]] * (width - len(e))] for e in edges], np.uint64).reshape(-1, width)
        self.stream_VE = np.full((len(edges), width), -1)
        repeated = []
        for number, stream in enumerate(streams):
            original = self.stream_VE[stream.variant, stream.bucket]
            if original < 0:
                self.stream_VE[stream.variant, stream.bucket] = number
            else:
                repeated.append((original, number))
        self.repeated = np.array(repeated, dtype=np.int64).reshape(-1, 2)
        buckets = [(v, n) for v, count in enumerate(self.buckets_V) for n in range(count)]
        unread = [bucket for bucket in buckets if self.stream_VE[bucket] < 0]
        for number, bucket in enumerate(unread, self.num_streams):
            self.stream_VE[bucket] = number
        self.num_unread = len(unread)
        self.key_indices = lru_cache(maxsize=16)(self._key_indices)

    def _key_indices(self, keys: tuple[str, ...]) -> np.ndarray:
        index = {key: number for number, key in enumerate(keys)}
        return np.array([index[feature] for feature in self.features], np.int64)

    def error(self, kjt: KeyedJaggedTensor, variant: int) -> ValueError:
        """The error for a variant with an id outside its table's rows."""
        feature = self.features[self.feature_V[variant]]
        error = outside_rows(feature, kjt[feature].values(), self._table_V[variant])
        assert error is not None
        return error


def _smallest_tables(routes: Routes) -> list[BaseEmbeddingConfig]:
    """For each variant the smallest table that reads it."""
    smallest: dict[int, BaseEmbeddingConfig] = {}
    for route in routes.ranks:
        for lookup in route.lookups:
            variant, table = route.streams[lookup.stream].variant, route.tables[lookup.group][lookup.table].config
            if variant not in smallest or table.num_embeddings < smallest[variant].num_embeddings:
                smallest[variant] = table
    return [smallest[variant] for variant in range(len(routes.variants))]


def _block(edges: Sequence[int]) -> int:
    sizes = [stop - start for start, stop in pairwise(edges)]
    even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0] and edges[-1] <= 1 << 32
    return sizes[0] if even else 0
