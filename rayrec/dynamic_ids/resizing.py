"""Changes the number of ranks or rows of a map, and creates maps from vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayrec.dynamic_ids.config import LATEST, DynamicIds, Evict
from rayrec.dynamic_ids.id_map import BY_ROW, IdMap, Listing
from rayrec.dynamic_ids.layout import mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A new map of a whole table, and the origin of its rows.

    Args:
        ids: The new map.
        source: `[rows]`. For each row of the new map, the row of the old table to copy weights and optimizer state
            from; -1 for a fresh row.
        dropped: Rows of the old table that were left out, because the bucket of their id is full. Ids with the lowest
            rank are dropped first.
    """

    ids: IdMap
    source: np.ndarray
    dropped: np.ndarray


def joined(maps: Sequence[IdMap]) -> IdMap:
    """Concatenates the maps of all ranks, in rank order, to the map of the whole table."""
    whole = IdMap(maps[0].config)
    parts = [part.state() for part in maps]
    whole.load({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, maps[0].clock)
    return whole


def cut(whole: IdMap, rank: int, ranks: int) -> IdMap:
    """Copies the rows and buckets of one rank out of the map of the whole table."""
    part = IdMap(whole.config, rank, ranks)
    rows = slice(part.first_row, part.first_row + len(part.identity))
    buckets = slice(part.buckets.start, part.buckets.stop)
    part.load({name: own[rows if name in BY_ROW else buckets] for name, own in whole.state().items()}, whole.clock)
    return part


def resized(whole: IdMap, config: DynamicIds) -> Resized:
    """Moves the ids of a table to a table with another configuration.

    Fallback rows copy the old fallback rows at the same relative position. The filter keeps its counts if the number of
    buckets is a multiple of the old one; otherwise it starts empty.
    """
    listing = whole.listing()
    listing = replace(listing, counts=whole.score[listing.rows])
    new = _placed(listing, config, whole.clock)
    old_layout, layout = whole.layout, config.layout
    shared, old_shared = layout.fallback_rows(), old_layout.fallback_rows()
    new.source[shared] = old_shared[np.arange(shared.size) * old_shared.size // shared.size]
    split, rest = divmod(layout.buckets, old_layout.buckets)
    if not rest and new.ids.cells.shape[1] == whole.cells.shape[1]:
        new.ids.cells[...], new.ids.sighted[...] = (np.repeat(own, split, 0) for own in (whole.cells, whole.sighted))
    return new


def grown(whole: IdMap, most: int, fill: float = 0.8) -> Resized | None:
    """Doubles the rows of a table if a share of at least `fill` of its own rows is used. Call it at a checkpoint.

    Args:
        whole: The map of the whole table. The result depends on it alone, and is the same on every rank.
        most: Maximum number of rows.

    Returns:
        None if the table keeps its size.
    """
    statistics, rows = whole.statistics(), min(2 * whole.config.rows, most)
    if statistics["rows_used"] < fill * statistics["rows"] or rows <= whole.config.rows:
        return None
    return resized(whole, replace(whole.config, rows=rows))


def map_of(ids: np.ndarray, config: DynamicIds, clock: int, counts: np.ndarray | None = None) -> Resized:
    """Creates the map for a table that was trained with a vocabulary. Id n has row n of the old table.

    Args:
        ids: int64, distinct.
        clock: Time in seconds to record as the last lookup of every id.
        counts: Number of lookups of each id; default: 1. If a bucket is full, the ids with the fewest are dropped.

    Raises:
        ValueError: An id occurs twice.
    """
    distinct, times = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(f"id {distinct[times.argmax()]} occurs {times.max()} times; the ids of a map must be distinct")
    counts = np.ones(len(ids), np.uint32) if counts is None else np.clip(counts, 1, 2**31 - 1).astype(np.uint32)
    seen = np.full(len(ids), clock, np.uint32)
    return _placed(Listing(ids=ids, rows=np.arange(len(ids)), counts=counts, last_seen=seen), config, clock)


def _placed(listing: Listing, config: DynamicIds, clock: int) -> Resized:
    new, layout = IdMap(config), config.layout
    new.clock = clock
    bucket, by = layout.bucket(listing.ids), (listing.counts, listing.last_seen)
    if config.half_life_s is not None:
        age = clock // config.half_life_s - listing.last_seen.astype(np.int64) // config.half_life_s
        by = (listing.counts >> np.minimum(31, age).astype(np.uint32), listing.last_seen)
    major, minor = (LATEST - key.astype(np.int64) for key in (by[::-1] if config.evict is Evict.LRU else by))
    order = np.lexsort((mix(listing.ids), minor, major, bucket))
    bucket = bucket[order]
    slot = np.arange(len(order)) - np.searchsorted(bucket, bucket)
    fits = slot < layout.own_rows
    rows, kept = bucket[fits] * layout.bucket_rows + slot[fits], order[fits]
    new.identity[rows], new.score[rows] = listing.ids[kept], listing.counts[kept]
    new.last_seen[rows] = listing.last_seen[kept]
    source = np.full(layout.rows, -1)
    source[rows] = listing.rows[kept]
    return Resized(ids=new, source=source, dropped=np.sort(listing.rows[order[~fits]]))
