"""What a collection's routes say about every id, as arrays: which feature's it is, which bucket of rows it falls into,
and which stream receives that bucket. Suffixes: V variants, E row edges, S streams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rayrec.distributed.ids.routes import Routes
from rayrec.modules import BaseEmbeddingConfig
from rayrec.modules.embedding import outside_rows
from rayrec.sparse import KeyedJaggedTensor


class Buckets:
    """The buckets of rows of each variant.

    Args:
        routes: of the collection.

    Attributes:
        features: of the routes.
        feature_V: place of each variant's feature.
        buckets_V: how many there are; 1 for a variant that is not cut.
        block_V: rows of a bucket, where all have equally many but the last, which has no more; else 0.
        edges_VE: their row edges; the last one is repeated.
        stream_VE: the stream of each bucket.
        repeated: pairs of streams; the second is as the first.
        num_streams: that ranks receive.
        num_unread: further streams, that no rank receives: a bucket of rows that one rank holds with those of another
            variant.
    """

    def __init__(self, routes: Routes) -> None:
        self.features = routes.features
        feature = {name: number for number, name in enumerate(routes.features)}
        streams = [stream for route in routes.ranks for stream in route.streams]
        self.num_streams = len(streams)
        self._table_V = _smallest_tables(routes)
        with_tables = zip(routes.variants, self._table_V, strict=True)
        edges = [variant.edges or (0, table.num_embeddings) for variant, table in with_tables]
        most = max(map(len, edges), default=2)
        self.feature_V = np.array([feature[variant.feature] for variant in routes.variants], np.int64)
        self.buckets_V = np.array([len(of_variant) - 1 for of_variant in edges], np.int64)
        self.block_V = np.array([_block(of_variant) for of_variant in edges], dtype=np.uint64)
        self.edges_VE = np.array([[*e, *[e[-1]] * (most - len(e))] for e in edges], np.uint64).reshape(-1, most)
        self.stream_VE = np.full((len(edges), most), -1)
        repeated = []
        for number, stream in enumerate(streams):
            first = self.stream_VE[stream.variant, stream.bucket]
            if first < 0:
                self.stream_VE[stream.variant, stream.bucket] = number
            else:
                repeated.append((first, number))
        self.repeated = np.array(repeated, dtype=np.int64).reshape(-1, 2)
        unread = [(v, n) for v, of_v in enumerate(edges) for n in range(len(of_v) - 1) if self.stream_VE[v, n] < 0]
        for number, place in enumerate(unread, self.num_streams):
            self.stream_VE[place] = number
        self.num_unread = len(unread)

    def error(self, kjt: KeyedJaggedTensor, variant: int) -> ValueError:
        """Of a variant with an id outside its table's rows."""
        feature = self.features[self.feature_V[variant]]
        error = outside_rows(feature, kjt[feature].values(), self._table_V[variant])
        assert error is not None
        return error


def _smallest_tables(routes: Routes) -> list[BaseEmbeddingConfig]:
    """For each variant the smallest table that reads it."""
    found: dict[int, BaseEmbeddingConfig] = {}
    for route in routes.ranks:
        for lookup in route.lookups:
            variant, table = route.streams[lookup.stream].variant, route.tables[lookup.group][lookup.table].config
            if variant not in found or table.num_embeddings < found[variant].num_embeddings:
                found[variant] = table
    return [found[variant] for variant in range(len(routes.variants))]


def _block(edges: Sequence[int]) -> int:
    sizes = [stop - start for start, stop in pairwise(edges)]
    even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0] and edges[-1] <= 1 << 32
    return sizes[0] if even else 0
