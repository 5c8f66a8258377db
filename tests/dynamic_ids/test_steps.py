"""The compiled rule, its tensor form and any number of ranks against the dictionary model, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.dynamic_ids import (
    EMPTY,
    EMPTY_IN_FIRST,
    ZERO,
    DeviceIdMap,
    DynamicIds,
    Evict,
    IdMap,
    Mapped,
    SharedMap,
    TableMaps,
    joined,
    unmix,
)
from tests.dynamic_ids.oracle import Oracle

SPECIAL = [0, -1, 1, -(2**63), 2**63 - 1, EMPTY, EMPTY_IN_FIRST, unmix(1), unmix(2**64 - 2), unmix(2**63)]
RULES: list[dict[str, Any]] = [
    {},
    {"evict": Evict.LRU, "ttl_s": 5},
    {"evict": Evict.LFU_DECAY, "half_life_s": 3},
    {"evict": Evict.LFU_DECAY, "half_life_s": 2, "ttl_s": 9, "min_count": 2},
    {"min_count": 3, "fallback": 0.3},
    {"probability": 0.4, "seed": -7, "evict": Evict.LRU},
    {"ttl_s": 1},
    {"evict": Evict.LFU_AGED},
    {"evict": Evict.LFU_AGED, "min_count": 2, "ttl_s": 20},
]
ids = st.one_of(st.sampled_from(SPECIAL), st.integers(-40, 40), st.integers(-(2**63), 2**63 - 1))
steps = st.lists(st.tuples(st.lists(ids, max_size=60), st.integers(0, 6)), min_size=1, max_size=12)


def changes_of(mapped: Mapped, first_row: int) -> Counter[tuple[int, int | None, int | None]]:
    """(row, id that left, id that came) of each change."""
    each = mapped.changes
    columns = (each.row + first_row, each.old, each.new, each.left, each.taken)
    return Counter(
        (row, old if left else None, new if taken else None)
        for row, old, new, left, taken in zip(*(column.tolist() for column in columns), strict=True)
    )


def same(maps: list[IdMap], other: IdMap) -> None:
    for name, array in joined(maps).state().items():
        np.testing.assert_array_equal(array, other.state()[name], name)


@settings(max_examples=150)
@given(st.sampled_from(RULES), st.sampled_from([4, 9, 16, 61, 200]), steps, st.randoms(use_true_random=False))
def test_every_form_is_the_dictionary_model(rule: dict[str, Any], rows: int, program: Any, random: Any) -> None:
    config = DynamicIds(rows=rows, **rule)
    layout, oracle, clock = config.layout, Oracle(config), 1
    worlds = {ranks: [IdMap(config, rank, ranks) for rank in range(ranks)] for ranks in (1, 2, 3, 5)}
    device = DeviceIdMap(worlds[1][0], "cpu")
    for lookups, seconds in program:
        clock += seconds
        random.shuffle(lookups)  # the order of a batch does not matter
        row_of, changes = oracle.step(lookups, clock)
        rows_of_ids = [row_of[key] for key in lookups]
        batch = np.array(lookups, np.int64)
        totals = []
        for ranks, maps in worlds.items():
            owner, total = layout.owner(batch, ranks), Counter[str]()
            found, seen = np.empty(len(batch), np.int64), Counter[Any]()
            for rank, own in enumerate(maps):
                mapped = own.step(batch[owner == rank], clock)
                found[owner == rank] = mapped.rows + own.first_row
                seen += changes_of(mapped, own.first_row)
                total.update(mapped.statistics)
            assert found.tolist() == rows_of_ids and seen == Counter(changes)
            same(maps, worlds[1][0])
            totals.append(dict(total))
        assert all(total == totals[0] for total in totals)
        on_device = device.step(torch.from_numpy(batch), clock)
        assert on_device.rows.tolist() == rows_of_ids
        assert on_device.statistics.tolist() == list(totals[0].values())
        columns = (on_device.changes.row, on_device.changes.old, on_device.changes.new, on_device.changes.kind)
        told = [change for change in zip(*(column.tolist() for column in columns), strict=True) if change[0] >= 0]
        assert Counter((r, old if k & 2 else None, new if k & 1 else None) for r, old, new, k in told) == Counter(
            changes
        )
        same([device.to_host()], worlds[1][0])
        holds_what_it_must(worlds[1][0], oracle, batch, totals[0])


def test_a_bucket_in_two_windows_of_lookups_ages_its_filter_once() -> None:
    config = DynamicIds(rows=100, min_count=2)
    host, draw = IdMap(config), np.random.default_rng(0)
    device = DeviceIdMap(host, "cpu")
    for clock in (1, 2):
        ids = draw.integers(0, 300, 90_000)
        assert device.step(torch.from_numpy(ids), clock).rows.tolist() == host.step(ids, clock).rows.tolist()
        same([device.to_host()], host)


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.sampled_from([4, 16, 130]), st.integers(1, 40), st.integers(0, 99))
def test_all_that_a_step_changes_is_marked(rule: dict[str, Any], rows: int, lookups: int, seed: int) -> None:
    """An increment has what is marked, so loading a chain of them must restore the whole map: nothing may be missing.

    A few lookups a step and full buckets: ids that a step does not look up change as well, and most rows do not."""
    shared = SharedMap(name="t", tables=("t",), features=("f",), config=DynamicIds(rows=rows, **rule))
    maps, draw = TableMaps([shared], 0, 1, lambda messages: messages), np.random.default_rng(seed)
    maps.track_changes()
    for number in range(1, 13):
        before = {part.name: (part.array.copy(), part.changed) for part in maps.saved()}
        maps.step([draw.integers(0, 3 * rows, 4 * rows if number < 4 else lookups)], None, number)
        for part in maps.saved():
            array, marks = before[part.name]
            if marks is None:  # the clock, which every increment has
                continue
            differs = (array != part.array).reshape(len(array), -1).any(1)
            assert marks[differs].all(), (part.name, np.flatnonzero(differs & ~marks))
        for _, marks in before.values():
            if marks is not None:
                marks[:] = False


def holds_what_it_must(own: IdMap, oracle: Oracle, batch: np.ndarray, statistics: dict[str, int]) -> None:
    """No id twice, each id in its bucket, found again, counts as in the model, nothing left marked."""
    used = np.flatnonzero(own.score)
    state = {row: (int(own.identity[row]), int(own.score[row]), int(own.last_seen[row])) for row in used.tolist()}
    assert state == oracle.rows
    assert len({key for key, _, _ in state.values()}) == len(state)
    assert (own.layout.bucket(own.identity[used]) == used // own.layout.bucket_rows).all()
    assert (used % own.layout.bucket_rows < own.layout.own_rows).all()
    empty = np.setdiff1d(np.arange(own.layout.rows), used)
    assert (own.layout.bucket(own.identity[empty]) != empty // own.layout.bucket_rows).all()
    listing = own.listing()
    assert own.find(listing.ids).tolist() == listing.rows.tolist()
    assert statistics["lookups"] == len(batch)
    before = [array.copy() for array in own.state().values()]
    assert (np.isin(own.find(batch, ZERO), [ZERO, *listing.rows])).all()
    assert DeviceIdMap(own, "cpu").find(torch.from_numpy(batch)).tolist() == own.find(batch).tolist()
    assert all((a == b).all() for a, b in zip(before, own.state().values(), strict=True)), "a search changed the map"
