"""Checks the shards of quantized tables, and copies the bytes of the local ones."""

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


def check_shards(table: TablePlace, shards: Sequence[Shard], ranks: int) -> None:
    """Checks that shards cover a table exactly once.

    Raises:
        ValueError: they do not, or a rank is outside the world, or a shard divides a byte.
    """
    name, rows, cols = f"table {table.table!r}", Span(0, table.rows), Span(0, table.dim)
    for shard in shards:
        if not 0 <= shard.rank < ranks:
            raise ValueError(f"{name}: a shard is on rank {shard.rank}, outside the world of {ranks} ranks")
        if rows.overlap(shard.rows) != shard.rows or cols.overlap(shard.cols) != shard.cols:
            raise ValueError(
                f"{name} is {table.rows} x {table.dim}, but a shard has rows {shard.rows}, columns {shard.cols}"
            )
        if table.format is TableFormat.INT4 and (shard.cols.start % 2 or shard.cols.stop % 2):
            raise ValueError(f"{name}: int4 stores two columns per byte; cut it at even columns, not {shard.cols}")
    for first, second in combinations(shards, 2):
        overlap = first.rows.overlap(second.rows)
        if overlap.size and first.cols.overlap(second.cols).size:
            raise ValueError(f"{name}: ranks {first.rank} and {second.rank} both have rows {overlap}; cut the table")
    if sum(shard.rows.size * shard.cols.size for shard in shards) != table.rows * table.dim:
        raise ValueError(f"{name}: the {len(shards)} shards do not cover its {table.rows} x {table.dim} values")


def local_shards(unsharded: Any, configs: Sequence[Any], route: Route) -> Any:
    """Returns a quantized collection with one table per local shard; None without local shards. Tables that are cut by
    rows return sums instead of means.

    Args:
        unsharded: a quantized collection.
        configs: configs of its tables.
        route: the exchange of the collection.
    """
    if not route.local_shards:
        return None
    by_name = {table.name: table for table in configs}
    shard_configs: list[Any] = []
    for table, shard in route.local_shards:
        rows = shard.rows if shard.rows.size < table.num_embeddings else None
        config = replace(
            by_name[table.name],
            name=_name(len(shard_configs)),
            num_embeddings=shard.rows.size,
            embedding_dim=shard.cols.size,
            feature_names=[Stream(feature, rows).key for feature in table.feature_names],
        )
        if isinstance(config, EmbeddingBagConfig) and table.name in route.cut_by_rows:
            config = replace(config, pooling=PoolingType.SUM)
        shard_configs.append(config)
    tables, data = _cut(unsharded, route)
    if isinstance(unsharded, EmbeddingBagCollection):
        return EmbeddingBagCollection(shard_configs, tables, data, unsharded.is_weighted(), unsharded.row_alignment)
    return EmbeddingCollection(shard_configs, tables, data, row_alignment=unsharded.row_alignment)


def _name(number: int) -> str:
    return f"shard_{number}"


def _cut(
    unsharded: EmbeddingBagCollection | EmbeddingCollection, route: Route
) -> tuple[list[TablePlace], torch.Tensor]:
    """Returns the layout of the local shards, and a copy of their bytes."""
    by_name, alignment = {table.table: table for table in unsharded.places}, unsharded.row_alignment
    layout: list[TablePlace] = []
    offset = 0
    for number, (config, shard) in enumerate(route.local_shards):
        format, dim = by_name[config.name].format, shard.cols.size
        layout.append(
            TablePlace(
                table=_name(number),
                format=format,
                rows=shard.rows.size,
                dim=dim,
                begin=offset,
                row_bytes=format.row_bytes(dim, alignment),
            )
        )
        offset = -(-layout[-1].end // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    data = torch.zeros(offset, dtype=torch.uint8, device=unsharded.device)
    for local, (config, shard) in zip(layout, route.local_shards, strict=True):
        table = by_name[config.name]
        table_bytes = unsharded.data[table.begin : table.end].view(table.rows, table.row_bytes)
        rows = table_bytes[shard.rows.start : shard.rows.stop]
        header = table.format.header_bytes
        start, stop = (header + column * table.format.bits // 8 for column in (shard.cols.start, shard.cols.stop))
        target = data[local.begin : local.end].view(local.rows, local.row_bytes)
        target[:, :header] = rows[:, :header]
        target[:, header : header + stop - start] = rows[:, start:stop]
    return layout, data
