"""The maps of a config's tables with dynamic ids, and batches of ids that become batches of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rayrec.checkpoint.weights import CheckpointWeights
from rayrec.data.mapping.rules import Dynamic
from rayrec.dynamic_ids import DynamicIds, Evict, SharedMap, TableMaps, connected
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.config.train_config import TrainConfig


def shared_maps(config: TrainConfig) -> list[SharedMap]:
    """One map for each group of tables that are connected by features with dynamic ids."""
    rules, rows = config.data_schema.dynamic, {table.name: table.rows for table in config.tables}
    groups = connected([(table.name, table.features) for table in config.tables], rules)
    return [
        SharedMap(
            name=tables[0],
            tables=tuple(tables),
            features=tuple(features),
            config=_of(rules[features[0]], rows[tables[0]], config.trainer.seed),
            timed=rules[features[0]].time is not None,
            drops=rules[features[0]].unseen == "zero",
        )
        for tables, features in groups
    ]


def _of(rule: Dynamic, rows: int, seed: int) -> DynamicIds:
    rule = rule.resolved
    assert rule.evict is not None and rule.admit is not None
    return DynamicIds(
        rows=rows,
        evict=Evict[rule.evict.upper()],
        half_life_s=rule.half_life,
        ttl_s=rule.ttl,
        min_count=rule.admit.min_count,
        probability=rule.admit.probability,
        fallback=rule.fallback,
        seed=seed,
    )


def map_bytes(config: TrainConfig) -> int:
    """Bytes of host memory of all maps; each rank has its share of the buckets."""
    return sum(each.config.nbytes for each in shared_maps(config))


def maps_of(config: TrainConfig, weights: CheckpointWeights) -> TableMaps:
    """The whole maps of a checkpoint."""
    maps = TableMaps(shared_maps(config), 0, 1, lambda messages: messages)
    for part in maps.saved():
        part.array[...] = weights.map_array(part.name).numpy()
    maps.finish_loading()
    return maps


def found(batch: Batch, maps: TableMaps) -> Batch:
    """A batch of ids as one of rows, for evaluation. A collective of the maps' ranks."""
    return with_rows(batch, maps.shared, maps.find(ids_of(batch.sparse, maps.shared)))


def ids_of(kjt: KeyedJaggedTensor, shared: Sequence[SharedMap]) -> list[np.ndarray]:
    """For each map, the ids in a batch on the host."""
    values = kjt.values().numpy()
    return [
        values[spans[0]] if len(spans) == 1 else np.concatenate([values[span] for span in spans])
        for spans in _spans(kjt, shared)
    ]


def places_of(kjt: KeyedJaggedTensor, shared: Sequence[SharedMap]) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """An array for the values of `with_rows`; for each map, the part to write its rows to, None if it has several."""
    ids, spans_of = kjt.values().numpy(), _spans(kjt, shared)
    size = sum(span.stop - span.start for spans in spans_of for span in spans)
    # A copy only if there are other features, because it takes as long as to write the rows.
    mapped = np.empty_like(ids) if size == len(ids) else ids.copy()
    return mapped, [mapped[spans[0]] if len(spans) == 1 else None for spans in spans_of]


def with_rows(
    batch: Batch,
    shared: Sequence[SharedMap],
    rows: Sequence[np.ndarray],
    places: tuple[np.ndarray, list[np.ndarray | None]] | None = None,
) -> Batch:
    """The batch with rows in place of the ids of `ids_of`. Ids with row -1 are left out of their lists.

    Args:
        places: Of `places_of`, if rows were written there.
    """
    kjt = batch.sparse
    mapped, views = places or places_of(kjt, shared)
    for spans, rows_of, view in zip(_spans(kjt, shared), rows, views, strict=True):
        if rows_of is view:
            continue
        position = 0
        for span in spans:
            size = span.stop - span.start
            mapped[span] = rows_of[position : position + size]
            position += size
    values = torch.from_numpy(mapped)
    lengths, weights = kjt.lengths(), kjt.weights_or_none()
    sizes: list[int] | None = kjt.length_per_key()
    if any(each.drops for each in shared) and not (keep := values >= 0).all():
        bag = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.long())
        lengths = torch.bincount(bag[keep], minlength=lengths.numel()).to(lengths.dtype)
        values, weights, sizes = values[keep], None if weights is None else weights[keep], None
    sparse = KeyedJaggedTensor(
        kjt.keys(), values, weights=weights, lengths=lengths, stride=kjt.stride(), length_per_key=sizes
    )
    return replace(batch, sparse=sparse)


def _spans(kjt: KeyedJaggedTensor, shared: Sequence[SharedMap]) -> list[list[slice]]:
    """For each map, the positions of its features' ids."""
    number, bounds = {key: index for index, key in enumerate(kjt.keys())}, kjt.offset_per_key()
    return [[slice(bounds[number[name]], bounds[number[name] + 1]) for name in each.features] for each in shared]
