"""What happens around steps: clock, sweeps, ranks that change, other sizes, vocabularies, forgetting, exports."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.dynamic_ids import (
    HASHED,
    ZERO,
    Changes,
    DynamicIds,
    Evict,
    ExportedIds,
    IdMap,
    Layout,
    advance,
    cut,
    export,
    grown,
    joined,
    map_of,
    newest_times,
    resized,
)

ROOT = Path(__file__).resolve().parents[2]
RATINGS = Path(os.environ.get("RAYREC_SHARED_DATA", ROOT.parent / "shared" / "data")) / "ml_latest_small_ratings.csv.gz"
DAY = 86_400
EVERYTHING = DynamicIds(rows=1000, evict=Evict.LFU_DECAY, half_life_s=5, ttl_s=12, min_count=2)


def program(steps: int = 40, seed: int = 0) -> Iterator[tuple[np.ndarray, int]]:
    """Batches with clocks: hot ids, rare ids, and ids that come for a while."""
    draw = np.random.default_rng(seed)
    for clock in range(1, steps + 1):
        hot, rare = draw.integers(0, 50, 200), draw.integers(-(2**63), 2**63 - 1, 100)
        yield np.concatenate([hot, rare, draw.integers(0, 300, 400) + 100 * clock]), clock


def same(one: IdMap, other: IdMap) -> None:
    assert one.clock == other.clock
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, other.state()[name], name)


def trained(config: DynamicIds, steps: int = 40) -> IdMap:
    own = IdMap(config)
    for ids, clock in program(steps):
        own.step(ids, clock)
    return own


def run_on(maps: list[IdMap], ids: np.ndarray, clock: int) -> list[Changes]:
    owner = maps[0].layout.owner(ids, len(maps))
    return [own.step(ids[owner == rank], clock).changes for rank, own in enumerate(maps)]


def ids_that_left(told: list[Changes]) -> list[int]:
    return [key for changes in told for key in changes.old[changes.left].tolist()]


def test_counts_of_distinct_ids_are_those_of_repeated_ones() -> None:
    repeated, distinct = IdMap(EVERYTHING), IdMap(EVERYTHING)
    for ids, clock in program():
        one = repeated.step(ids, clock)
        keys, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        other = distinct.step(keys, clock, counts.astype(np.uint32))
        assert (other.rows[inverse] == one.rows).all() and other.statistics == one.statistics
    same(repeated, distinct)


def test_a_row_is_never_used_by_two_ids_of_a_step_and_newcomers_stay() -> None:
    own = IdMap(DynamicIds(rows=128, evict=Evict.LRU))
    for ids, clock in program():
        mapped = own.step(ids, clock)
        rows = mapped.rows[mapped.rows % 64 < own.layout.own_rows]
        keys = ids[mapped.rows % 64 < own.layout.own_rows]
        assert len(np.unique(rows)) == len(np.unique(keys))
        taken = mapped.changes.taken
        assert (own.identity[mapped.changes.row[taken]] == mapped.changes.new[taken]).all()


def test_an_id_that_is_no_better_than_those_in_the_bucket_evicts_none() -> None:
    """Ids of one second do not push each other out; an id seen later than an equal one does."""
    own = IdMap(DynamicIds(rows=128))
    assert own.step(np.arange(1000), 5).statistics["admitted"] == 2 * own.layout.own_rows
    again = own.step(np.arange(1000, 2000), 5).statistics
    assert again["evicted"] == again["admitted"] == 0 and again["refused"] == 1000
    assert own.step(np.arange(2000, 3000), 6).statistics["evicted"] == 2 * own.layout.own_rows


def test_an_id_is_admitted_at_its_count_and_others_wait_in_fallback_rows() -> None:
    own = IdMap(DynamicIds(rows=6400, min_count=3))
    ids = np.arange(-500, 500)
    for sight in (1, 2):
        mapped = own.step(ids, sight)
        assert (
            mapped.rows == own.layout.fallback_row(ids)
        ).mean() > 0.97  # the filter may count too much, never too little
    assert own.step(ids, 3).statistics["waiting"] == 0
    assert (own.find(ids) % 64 < own.layout.own_rows).all()
    assert own.score.sum() >= 3 * 1000, "the count before the admission is kept"


def test_ageing_forgets_ids_that_wait() -> None:
    own, draw = IdMap(DynamicIds(rows=640, min_count=3)), np.random.default_rng(0)
    own.step(np.repeat(np.arange(100), 2), 1)
    for clock in range(2, 60):  # 5,800 other ids, once each, for 10 buckets whose counts halve every 48
        own.step(draw.integers(-(2**63), 2**63 - 1, 100), clock)
    assert own.step(np.arange(100), 60).statistics["waiting"] > 60


def test_admission_at_random_is_repeatable_and_has_its_probability() -> None:
    config = DynamicIds(rows=64_000, probability=0.1, seed=3)
    first, other = IdMap(config), IdMap(replace(config, seed=4))
    for sight in range(1, 11):
        ids = np.arange(20_000)
        first.step(ids, sight)
        other.step(ids, sight)
    share = (first.find(np.arange(20_000), ZERO) >= 0).mean()
    assert abs(share - (1 - 0.9**10)) < 0.02
    assert (first.identity != other.identity).any()
    many = IdMap(config).step(np.repeat(np.arange(20_000), 10), 1)
    assert abs(many.statistics["admitted"] / 20_000 - (1 - 0.9**10)) < 0.02, "ten lookups of a step are ten chances"


def test_a_sweep_and_a_change_of_ranks_at_any_time_change_nothing() -> None:
    """As a kill does: what is resumed was swept, saved by some ranks and loaded by others."""
    undisturbed, maps, draw = IdMap(EVERYTHING), [IdMap(EVERYTHING)], np.random.default_rng(1)
    lost: tuple[Counter[int], ...] = (Counter(), Counter())
    for ids, clock in program(60):
        swept = []
        if draw.random() < 0.3:
            swept = [own.sweep() for own in maps]
            whole, ranks = joined(maps), draw.choice([1, 2, 3, 5])
            maps = [cut(whole, rank, ranks) for rank in range(ranks)]
        lost[0].update(ids_that_left([undisturbed.step(ids, clock).changes]))
        lost[1].update(ids_that_left(swept + run_on(maps, ids, clock)))
    whole = joined(maps)
    lost[0].update(ids_that_left([undisturbed.sweep()]))
    lost[1].update(ids_that_left([whole.sweep()]))
    same(undisturbed, whole)
    assert lost[0] == lost[1] and lost[0].total() > 1000


def test_22_years_expire_the_same_ids_at_any_speed() -> None:
    """Replayed with and without sweeps, on one and three ranks; without evictions the expired are plain arithmetic."""
    if not RATINGS.exists():
        pytest.skip(f"needs {RATINGS.name} in {RATINGS.parent} (RAYREC_SHARED_DATA)")
    with gzip.open(RATINGS, "rt") as file:
        rows = sorted((int(row["timestamp"]), int(row["userId"])) for row in csv.DictReader(file))
    times, users = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    config = DynamicIds(rows=4096, ttl_s=30 * DAY)
    slow, fast, clock = IdMap(config), [IdMap(config, rank, 3) for rank in range(3)], 0
    expired: tuple[Counter[int], ...] = (Counter(), Counter(), Counter())
    last: dict[int, int] = {}
    for number, at in enumerate(range(0, len(users), 500)):
        ids, when = users[at : at + 500], times[at : at + 500]
        clock = advance(clock, [newest_times(part) for part in np.array_split(when, 1 + number % 4)])
        expired[0].update(key for key in set(ids.tolist()) if key in last and clock - last[key] > 30 * DAY)
        last.update(dict.fromkeys(ids.tolist(), clock))
        swept = [own.sweep() for own in fast] if number % 7 == 0 else []
        expired[1].update(ids_that_left([slow.step(ids, clock).changes]))
        expired[2].update(ids_that_left(swept + run_on(fast, ids, clock)))
    expired[0].update(key for key, seen in last.items() if clock - seen > 30 * DAY)
    expired[1].update(ids_that_left([slow.sweep()]))
    expired[2].update(ids_that_left([own.sweep() for own in fast]))
    assert expired[0] == expired[1] == expired[2] and expired[0].total() > 500
    same(slow, joined(fast))


def test_the_clock_of_a_step() -> None:
    now = 1_700_000_000
    times = np.arange(now, now + 100)
    assert advance(0, [newest_times(times)]) == now + 92, "the eighth newest"
    assert advance(0, [newest_times(times[::2]), newest_times(times[1::2])]) == now + 92, "of all ranks"
    wrong = np.concatenate([times, np.full(7, 2**60)])
    assert now + 99 == advance(now, [newest_times(wrong)]), "seven wrong rows do not expire a table"
    assert advance(now, [newest_times(times - DAY)]) == now, "it never goes back"
    assert advance(now, [newest_times(np.full(9, -1))]) == now, "unknown times"
    assert advance(now, [newest_times(np.full(9, 2**60))]) == 2**32 - 1
    assert advance(5, [newest_times(np.array([9, 7]))]) == 7, "fewer rows: the oldest"


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(-5, 60), max_size=20), min_size=1, max_size=5), st.integers(0, 40))
def test_the_clock_does_not_depend_on_the_ranks(times_of_ranks: list[list[int]], clock: int) -> None:
    every = np.array([time for times in times_of_ranks for time in times], np.int64)
    known = sorted((time for time in every.tolist() if time >= 0), reverse=True)[:8]
    expected = max(clock, known[-1]) if known else clock
    assert advance(clock, [newest_times(np.array(times, np.int64)) for times in times_of_ranks]) == expected


def test_forgotten_ids_are_unseen_and_their_rows_are_told() -> None:
    own = trained(DynamicIds(rows=6400))
    listing, gone = own.listing(), np.array([0, 7, 10**12])
    changes = own.forget(gone)
    assert sorted(changes.old.tolist()) == [0, 7] and changes.left.all() and not changes.taken.any()
    assert sorted(listing.rows[np.isin(listing.ids, gone)]) == sorted(changes.row)
    assert (own.find(gone, ZERO) == ZERO).all()
    kept = ~np.isin(listing.ids, gone)
    assert (own.find(listing.ids[kept]) == listing.rows[kept]).all()
    back = own.step(gone, 41)
    assert sorted(back.changes.new[back.changes.taken].tolist()) == sorted(gone.tolist())
    assert own.score[own.find(gone)].tolist() == [1, 1, 1]


@pytest.mark.parametrize("rows", [640, 1999, 2000, 6400])
def test_ids_move_to_another_size_with_their_rows(rows: int) -> None:
    old = trained(EVERYTHING)
    listing, new = old.listing(), resized(old, replace(EVERYTHING, rows=rows))
    after = new.ids.listing()
    assert len(after.ids) + len(new.dropped) == len(listing.ids)
    row_of = dict(zip(listing.ids.tolist(), listing.rows.tolist(), strict=True))
    assert new.source[after.rows].tolist() == [row_of[key] for key in after.ids.tolist()], "weights move with the ids"
    assert set(new.dropped.tolist()) == set(row_of.values()) - set(new.source[after.rows].tolist())
    assert (new.ids.find(after.ids) == after.rows).all() and new.ids.clock == old.clock
    if rows > 1000:
        assert not len(new.dropped)
    count_of = dict(zip(listing.ids.tolist(), listing.counts.tolist(), strict=True))
    assert after.counts.tolist() == [count_of[key] for key in after.ids.tolist()]
    fallback = np.arange(new.ids.layout.rows) % new.ids.layout.bucket_rows >= new.ids.layout.own_rows
    sources = new.source[fallback] % old.layout.bucket_rows
    assert (sources >= old.layout.own_rows).all(), "fallback rows stay fallback rows"


def test_what_is_dropped_is_the_least_of_its_bucket() -> None:
    old = trained(DynamicIds(rows=6400))
    new = resized(old, replace(old.config, rows=640))
    kept = new.ids.listing()
    bucket, least = new.ids.layout.bucket(kept.ids), np.full(10, 2**32)
    np.minimum.at(least, bucket, kept.counts)
    dropped = old.identity[new.dropped]
    assert (old.score[new.dropped] <= least[new.ids.layout.bucket(dropped)]).all() and len(dropped) > 100


def test_a_table_grows_by_doubling_and_ids_that_wait_go_on_waiting() -> None:
    small = IdMap(DynamicIds(rows=640, min_count=2))
    assert grown(small, 10_000) is None
    small.step(np.repeat(np.arange(5000), 2), 1)
    small.step(np.arange(-30, 0), 2)
    grow = grown(small, 10_000)
    assert grow is not None and grow.ids.config.rows == 1280 and not len(grow.dropped)
    assert grow.ids.step(np.arange(-30, 0), 3).statistics["waiting"] == 0
    assert grown(small, 1000) is not None and grown(small, 640) is None


def test_a_vocabulary_becomes_a_map_without_losing_rows() -> None:
    ids = np.random.default_rng(0).permutation(100_000)[:30_000] - 50_000
    made = map_of(ids, DynamicIds(rows=64_000), clock=9)
    listing = made.ids.listing()
    assert not len(made.dropped) and sorted(listing.ids) == sorted(ids)
    assert (ids[made.source[listing.rows]] == listing.ids).all()
    assert (listing.last_seen == 9).all()
    full = map_of(ids, DynamicIds(rows=6400), clock=9, counts=np.arange(30_000))
    assert full.dropped.min() == 0 and len(full.dropped) + len(full.ids.listing().ids) == 30_000
    with pytest.raises(ValueError, match="id 3 occurs 2 times"):
        map_of(np.array([3, 4, 3]), DynamicIds(rows=64), clock=0)


def test_an_exported_map_answers_as_the_map(tmp_path: Path) -> None:
    own = trained(EVERYTHING)
    for ids, _ in program(3, seed=5):
        own.step(ids[:10], own.clock + 13)  # most ids have expired, and none was swept
    export(own, tmp_path / "ids.bin")
    read = ExportedIds(tmp_path / "ids.bin")
    ids = np.concatenate([own.identity, np.arange(-100, 5000)])
    for unseen in (HASHED, ZERO, 3):
        assert (read.find(ids, unseen) == own.find(ids, unseen)).all()
    assert (read.find(ids, ZERO) == ZERO).sum() > 1000
    assert not read.identity.flags.owndata, "read in place"
    raw = (tmp_path / "ids.bin").read_bytes()
    for content, words in ((raw[:-8], "copy it again"), (b"x" * 80, "not an exported map"),
                           (raw[:16] + b"\2" + raw[17:], "has version 2"),
                           (raw[:24] + bytes(8) + raw[32:64], "is damaged")):  # fmt: skip
        (tmp_path / "bad.bin").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            ExportedIds(tmp_path / "bad.bin")


C_READER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static uint64_t mix(uint64_t h) {
  h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDull; h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53ull; return h ^ h >> 33;
}
static int64_t map[1 << 20];
int main(int argc, char **argv) {
  FILE *file = fopen(argv[1], "rb");
  if (!file || !fread(map, 8, 1 << 20, file) || memcmp(map, "rayrec.dynamic", 15)) return 1;
  uint64_t buckets = map[3], size = map[4], own = map[5];
  int64_t id;
  while (scanf("%ld", &id) == 1) {
    uint64_t h = mix(id), base = ((h >> 32) * buckets >> 32) * size, slot = 0;
    while (slot < own && map[8 + base + slot] != id) slot++;
    if (slot == own) slot += (h & 0xFFFFFFFF) * (size - own) >> 32;
    printf("%lu\n", base + slot);
  }
}
"""


def test_a_reader_in_c_of_twenty_lines_finds_the_same_rows(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    own = trained(DynamicIds(rows=1000))
    export(own, tmp_path / "ids.bin")
    (tmp_path / "reader.c").write_text(C_READER)
    subprocess.run(["gcc", "-O1", tmp_path / "reader.c", "-o", tmp_path / "reader"], check=True)
    ids = np.concatenate([own.identity, np.arange(-1000, 1000)])
    text = "\n".join(map(str, ids.tolist()))
    command = [tmp_path / "reader", tmp_path / "ids.bin"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == own.find(ids).tolist()


def test_bytes_of_a_row() -> None:
    configs = DynamicIds(rows=64_000, min_count=2), DynamicIds(rows=64_000)
    bytes_of_a_row = [IdMap(config).nbytes / 64_000 for config in configs]
    assert bytes_of_a_row == [config.nbytes / 64_000 for config in configs]
    assert bytes_of_a_row[0] <= 20 and bytes_of_a_row[1] <= 17


def test_a_search_of_many_ids_is_that_of_each() -> None:
    """A search takes ids in blocks, and what earlier searches noted about slots may be of ids that have left since."""
    own = IdMap(DynamicIds(rows=640, evict=Evict.LRU))
    draw = np.random.default_rng(0)
    for clock in range(1, 30):
        ids = draw.integers(0, 1500, 1300) ** 2
        own.step(ids, clock)
        row_of = dict(zip(own.identity[own.used()].tolist(), np.flatnonzero(own.used()).tolist(), strict=True))
        assert own.find(ids, ZERO).tolist() == [row_of.get(key, ZERO) for key in ids.tolist()]
        assert own.find(ids).tolist() == [own.find(ids[n : n + 1])[0] for n in range(len(ids))]


def test_ids_in_sequence_spread_over_buckets_and_ranks() -> None:
    layout = Layout.of(64_000, 0.1)
    for ids in (np.arange(40_000), np.arange(40_000) * 64_000, -np.arange(40_000), np.arange(40_000) << 40):
        lookups = np.bincount(layout.owner(ids, 64), minlength=64)
        assert lookups.max() / lookups.mean() < 1.15


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rows": 1}, "at least 4 rows"),
        ({"ttl_s": 0}, "leave it out to keep ids for ever"),
        ({"ttl_s": -1}, "from 1 to"),
        ({"evict": Evict.LFU_DECAY}, "set both or neither"),
        ({"half_life_s": 5}, "set both or neither"),
        ({"evict": Evict.LFU_DECAY, "half_life_s": 0}, "half_life_s=0"),
        ({"min_count": 0}, "from 1 to 255"),
        ({"min_count": 256}, "use probability"),
        ({"probability": 0.0}, "above 0"),
        ({"min_count": 2, "probability": 0.5}, "set one of them"),
        ({"fallback": 1.0}, "below 1"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_fix(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DynamicIds(**({"rows": 1000} | wrong))


def test_a_state_of_another_table_and_an_impossible_clock_are_refused() -> None:
    own, other = IdMap(DynamicIds(rows=1000)), IdMap(DynamicIds(rows=2000))
    with pytest.raises(ValueError, match=r"saved identity has shape \[.*\], this table needs"):
        own.load(other.state(), 0)
    with pytest.raises(ValueError, match="seconds from 0 to"):
        own.step(np.arange(3), -1)


def test_the_tensor_form_neither_waits_nor_copies_on_a_pretended_gpu() -> None:
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    command = [sys.executable, "-m", "tests.dynamic_ids.on_pretended_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["equal"] and not answer["syncs"] and not answer["copies"] and not answer["mismatches"], answer
