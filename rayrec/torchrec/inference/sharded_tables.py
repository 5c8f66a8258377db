"""A rank's rectangles of quantized tables: that a plan holds each table once, and the bytes of this rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from rayrec.distributed.plan.shards import Shard, Span
from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.quant import EmbeddingBagCollection, EmbeddingCollection, TableFormat, TablePlace
from rayrec.quant.layout import TABLE_ALIGNMENT
from rayrec.torchrec.inference.sharded_route import Route, Stream


def check_shards(place: TablePlace, shards: Sequence[Shard], ranks: int) -> None:
    """
    Raises:
        ValueError: they do not hold every number of the table once, name a rank that is not there, or cut a byte.
    """
    name, rows, cols = f"table {place.table!r}", Span(0, place.rows), Span(0, place.dim)
    for shard in shards:
        if not 0 <= shard.rank < ranks:
            raise ValueError(f"{name}: a shard is on rank {shard.rank}; there are ranks 0 to {ranks - 1}")
        if rows.overlap(shard.rows) != shard.rows or cols.overlap(shard.cols) != shard.cols:
            raise ValueError(
                f"{name} is {place.rows} x {place.dim}, but a shard has rows {shard.rows}, columns {shard.cols}"
            )
        if place.format is TableFormat.INT4 and (shard.cols.start % 2 or shard.cols.stop % 2):
            raise ValueError(f"{name}: int4 keeps two numbers in a byte; cut it at even columns, not {shard.cols}")
    for a, b in combinations(shards, 2):
        if a.rows.overlap(b.rows).size and a.cols.overlap(b.cols).size:
            raise ValueError(
                f"{name}: ranks {a.rank} and {b.rank} both hold rows {a.rows.overlap(b.rows)} of it; cut it"
            )
    if sum(shard.rows.size * shard.cols.size for shard in shards) != place.rows * place.dim:
        raise ValueError(
            f"{name}: the plan's {len(shards)} shards do not hold all of its {place.rows} x {place.dim} numbers"
        )


def own_part(unsharded: Any, configs: Sequence[Any], route: Route) -> Any:
    """This rank's shards as a quantized collection, a table each; None where it has none. Means over some rows become
    sums.

    Args:
        unsharded: a quantized collection of bags or of sequences.
        configs: of its tables.
    """
    if not route.own_shards:
        return None
    by_name = {table.name: table for table in configs}
    made: list[Any] = []
    for table, shard in route.own_shards:
        rows = shard.rows if shard.rows.size < table.num_embeddings else None
        config = replace(
            by_name[table.name],
            name=_name(len(made)),
            num_embeddings=shard.rows.size,
            embedding_dim=shard.cols.size,
            feature_names=[Stream(feature, rows).key for feature in table.feature_names],
        )
        if isinstance(config, EmbeddingBagConfig) and table.name in route.cut_by_rows:
            config = replace(config, pooling=PoolingType.SUM)
        made.append(config)
    places, data = _cut(unsharded, route)
    if isinstance(unsharded, EmbeddingBagCollection):
        return EmbeddingBagCollection(made, places, data, unsharded.is_weighted(), unsharded.row_alignment)
    return EmbeddingCollection(made, places, data, row_alignment=unsharded.row_alignment)


def _name(number: int) -> str:
    return f"shard_{number}"


def _cut(
    unsharded: EmbeddingBagCollection | EmbeddingCollection, route: Route
) -> tuple[list[TablePlace], torch.Tensor]:
    """Places of this rank's shards, and a copy of their bytes alone."""
    by_name, alignment = {place.table: place for place in unsharded.places}, unsharded.row_alignment
    made: list[TablePlace] = []
    at = 0
    for number, (table, shard) in enumerate(route.own_shards):
        format, dim = by_name[table.name].format, shard.cols.size
        row_bytes = format.row_bytes(dim, alignment)
        made.append(
            TablePlace(table=_name(number), format=format, rows=shard.rows.size, dim=dim, begin=at, row_bytes=row_bytes)
        )
        at = -(-made[-1].end // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    data = torch.zeros(at, dtype=torch.uint8, device=unsharded.device)
    for own, (table, shard) in zip(made, route.own_shards, strict=True):
        place = by_name[table.name]
        whole = unsharded.data[place.begin : place.end].view(place.rows, place.row_bytes)
        rows = whole[shard.rows.start : shard.rows.stop]
        header = place.format.header_bytes
        first, last = (header + column * place.format.bits // 8 for column in (shard.cols.start, shard.cols.stop))
        target = data[own.begin : own.end].view(own.rows, own.row_bytes)
        target[:, :header] = rows[:, :header]
        target[:, header : header + last - first] = rows[:, first:last]
    return made, data
