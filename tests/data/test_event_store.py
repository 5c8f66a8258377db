"""Stores of events: the same lists as an index made in memory, built in parts, resumed, and added to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec import cli
from rayrec.data import DataError, StoreSpec, build_store
from tests.data.test_entities import ALIKE
from tests.data.test_events import lists, rows_of, schema_of

SPEC = StoreSpec("user", "at", ("item", "action", "at_home", "day", "big"))


def named(users: Any) -> list[str]:
    """Names of users, of which some have the same hash; user 32 has no events."""
    return [ALIKE[(0, 1, 2, 32).index(n)] if n in (0, 1, 2, 32) else f"u{n}" for n in users]


def log_of(events: int, seed: int, of_text: bool) -> pa.Table:
    draw = np.random.default_rng(seed)
    user = np.minimum(draw.integers(0, 60, events), 30) % 30  # half of the events are of user 0
    null = draw.random(events) < 0.1
    return pa.table(
        {
            "user": pa.array(named(user) if of_text else user),
            "at": pa.array(draw.integers(0, 60, events), pa.timestamp("s")),
            "item": draw.integers(0, 99, events),
            "action": pa.array([f"a{n}" for n in draw.integers(0, 3, events)], mask=null),
            "at_home": draw.random(events) < 0.5,
            "day": pa.array(draw.integers(0, 9000, events), pa.int32()).cast(pa.date32()),
            "big": draw.integers(1 << 40, 1 << 41, events),
        }
    )


def write(folder: Path, parts: list[pa.Table], first: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        pq.write_table(part, folder / f"{first + number:02}.parquet", row_group_size=37)
    return folder


def histories(path: Path, of_text: bool, where: dict[str, Any]) -> dict[str, list[list[int]]]:
    draw = np.random.default_rng(9)
    users, now = draw.integers(0, 33, 80), pa.array(draw.integers(0, 70, 80), pa.timestamp("s"))
    schema = schema_of(path, 20, ("item", "action", "big"), where=where)
    features = [one.model_copy(update={"on_null": "empty"}) for one in schema.sparse]
    keys = named(users) if of_text else users
    return lists(schema.model_copy(update={"sparse": features}), user=pa.array(keys), now=now)


def bytes_of(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "about.json"
    }


@pytest.mark.parametrize("of_text", [False, True])
def test_a_store_gives_the_lists_of_an_index_made_in_memory(tmp_path: Path, of_text: bool) -> None:
    parts = [log_of(300, seed, of_text) for seed in range(4)]
    log = write(tmp_path / "log", parts)
    stores = {}
    for name, memory in (("one", 1 << 30), ("parts", 4000)):
        done = build_store(str(log), tmp_path / name, SPEC, memory_bytes=memory)
        assert (done.events, done.keys, done.added) == (1200, 30, 1200)
        stores[name] = bytes_of(tmp_path / name)
        assert not tmp_path.joinpath(f"{name}.building").exists()
    assert stores["one"] == stores["parts"], "the parts do not matter"
    for where in ({}, {"action": ["a0", "a2"]}, {"action": ["a1"], "item": [3, 4, 5, 6, 7, 8]}, {"item": [10_000]}):
        found, expected = (histories(path, of_text, where) for path in (tmp_path / "one", log))
        assert found == expected and (any(map(len, found["item"])) or where == {"item": [10_000]})


def test_users_of_one_hash_have_their_own_events(tmp_path: Path) -> None:
    """In a log, a store of few parts and of many pieces, one that was added to, and the events of a filter."""
    draw = np.random.default_rng(0)
    users, items = draw.integers(0, 3, 200), draw.integers(0, 9, 200)
    log = pa.table({"user": [ALIKE[n] for n in users], "at": np.arange(200), "item": items})
    whole = write(tmp_path / "log", [log.slice(0, 120), log.slice(120)])
    first, second = (write(tmp_path / name, [part]) for name, part in (("a", log.slice(0, 120)), ("b", log.slice(120))))
    spec = StoreSpec("user", "at", ("item",))
    build_store(str(whole), tmp_path / "one", spec)
    build_store(str(whole), tmp_path / "many", spec, memory_bytes=2000)
    for part in (first, second):
        build_store(str(part), tmp_path / "added", spec, append=part == second)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many") == bytes_of(tmp_path / "added")
    for where in ({}, {"item": [1, 2, 3]}):
        chosen = [[i for u, i in zip(users, items.tolist(), strict=True) if u == n and i in where.get("item", [i])]
                  for n in range(4)]  # fmt: skip
        for path in (whole, tmp_path / "one", tmp_path / "added"):
            assert lists(schema_of(path, 300, where=where), user=ALIKE, now=[500] * 4)["item"] == rows_of(chosen)


def test_events_that_are_added_by_day_are_as_if_they_had_been_there(tmp_path: Path) -> None:
    parts = [log_of(200, seed, True) for seed in range(3)]
    whole = write(tmp_path / "log", parts)
    build_store(str(whole), tmp_path / "whole", SPEC)
    for number, part in enumerate(parts):
        day = write(tmp_path / f"day-{number}", [part], number)
        options = [
            "--column",
            "item",
            "--column",
            "action",
            "--column",
            "at_home",
            "--column",
            "day",
            "--column",
            "big",
        ]
        line = ["data", "events", str(day), "--out", str(tmp_path / "store"), "--key", "user", "--time", "at", *options]
        assert cli.run([*line, "--memory-gib", "0.001", *(["--append"] if number else [])]) == 0
    assert bytes_of(tmp_path / "store") == bytes_of(tmp_path / "whole")
    with pytest.raises(DataError, match="the store exists"):
        build_store(str(whole), tmp_path / "store", SPEC)
    with pytest.raises(DataError, match="the store has key, time, columns"):
        build_store(str(whole), tmp_path / "store", SPEC._replace(columns=("item",)), append=True)


@pytest.mark.parametrize("append", [False, True])
def test_an_interrupted_build_goes_on(tmp_path: Path, append: bool) -> None:
    log = write(tmp_path / "log", [log_of(200, seed, True) for seed in range(3)])
    earlier = write(tmp_path / "earlier", [log_of(150, 7, True)])
    for name in ("store", "whole"):
        if append:
            build_store(str(earlier), tmp_path / name, SPEC)
    build_store(str(log), tmp_path / "whole", SPEC, append=append, memory_bytes=20_000)
    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    stops = 0
    while True:  # after every file and every part
        try:
            build_store(str(log), tmp_path / "store", SPEC, append=append, memory_bytes=20_000, on_progress=interrupt)
            break
        except KeyboardInterrupt:
            stops += 1
            for file in (tmp_path / "store.building").rglob("*"):
                if file.is_file() and file.parent.name in ("parts", "out"):  # a write that was not finished
                    with open(file, "ab") as torn:
                        torn.write(b"torn")
    assert said[:3] == ["read 1 of 3 files", "read 2 of 3 files", "read 3 of 3 files"] and stops == len(said) > 10
    assert bytes_of(tmp_path / "store") == bytes_of(tmp_path / "whole")


def test_a_build_that_an_earlier_release_began_starts_again(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [log_of(200, seed, True) for seed in range(2)])
    build_store(str(log), tmp_path / "whole", SPEC)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(str(log), tmp_path / "store", SPEC, on_progress=interrupt)
    digest, state = hashlib.sha256(f"{SPEC!r}\n0\n".encode()), tmp_path / "store.building" / "state.json"
    for file in sorted(log.iterdir()):
        size, changed = file.stat().st_size, file.stat().st_mtime_ns
        digest.update(f"Found(uri={str(file)!r}, size_bytes={size}, changed_ns={changed}, deleted=None)\n".encode())
    digest.update(b"\n")
    raw = {**json.loads(state.read_text()), "made_of": digest.hexdigest()}
    for name in ("names", "name_bytes"):  # that release knew keys by their hash alone
        raw.pop(name)
    state.write_text(json.dumps(raw))
    build_store(str(log), tmp_path / "store", SPEC)
    assert bytes_of(tmp_path / "store") == bytes_of(tmp_path / "whole")


def test_what_a_store_cannot_hold_is_named(tmp_path: Path) -> None:
    table = log_of(20, 0, False)
    nulls = pa.array([None, *range(1, 20)], pa.int64())
    for column, change, message in (
        ("user", nulls, "have no key"),
        ("at", nulls.cast(pa.timestamp("s")), "have no time"),
        ("item", pa.array([[1]] * 20), "numbers, times and texts, not list"),
    ):
        wrong = table.set_column(table.schema.get_field_index(column), column, change)
        folder = write(tmp_path / column, [wrong])
        with pytest.raises(DataError, match=message):
            build_store(str(folder), tmp_path / "store", SPEC)
    log = write(tmp_path / "log", [table])
    with pytest.raises(DataError, match="user_id"):
        build_store(str(log), tmp_path / "other", SPEC._replace(key="user_id"))
    build_store(str(log), tmp_path / "right", SPEC)
    schema = schema_of(tmp_path / "right", 5, key="item")
    with pytest.raises(DataError, match=r"the store of events has key and time \('user', 'at'\)"):
        lists(schema, user=[1], now=pa.array([1], pa.timestamp("s")))


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    """A file that is cut short when the store is opened; a changed byte when it is added to, or goes into an export."""
    log = write(tmp_path / "log", [log_of(20, 0, True)])
    build_store(str(log), tmp_path / "store", SPEC)
    column = tmp_path / "store" / "columns" / "0.arrow"
    whole = column.read_bytes()
    column.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"bytes instead of .*0\.arrow.*build the store again"):
        histories(tmp_path / "store", True, {})
    column.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"damaged \(wrong checksum\).*0\.arrow"):
        build_store(str(log), tmp_path / "store", SPEC, append=True)
    column.write_bytes(whole)
    build_store(str(log), tmp_path / "store", SPEC, append=True)
