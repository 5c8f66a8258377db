"""`Follower`: cuts what arrives in a folder or a topic into chunks, which are trained on one after the other.

A ledger records the files of each chunk before any of its rows is read. So a chunk has the same rows in the same order
after any restart and for any number of ranks, and a position in the data is the number of a chunk and the rows done in
it. One process of a run, rank 0, follows; before the workers start, the driver does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.arrays.arrow_types import decoded, micros_of
from rayrec.data.arrays.buffers import I64
from rayrec.data.config import FollowConfig, JoinConfig
from rayrec.data.live.growing_folder import Arrived, State, check_whole, new_files
from rayrec.data.live.join_files import FileJoin, Patience, sync
from rayrec.data.live.kafka_topic import READ_S, SCHEME, KafkaTopic, Offsets, together
from rayrec.data.live.label_join import JoinSpec
from rayrec.data.mapping.rules import duration_s
from rayrec.data.mapping.schema import Schema, Timestamp
from rayrec.data.source.dataset import DataSet
from rayrec.data.source.footers import FooterReading
from rayrec.data.source.manifest import Manifest
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged, first_line
from rayrec.storage.folder import Folder
from rayrec.storage.parquet import open_parquet

_KNOWN = "known.json"
_LANDED = 1000  # files with rows of a topic to keep; older ones can be read again
_LIST_S = 60.0  # between two looks for new partitions
_EARLIEST = -(1 << 62)
LEDGER, JOINED, LANDED = "followed", "joined", "landed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Files that are trained on together.

    Args:
        number: from 0; a run's epoch of this number trains on it.
        manifest: the rows.
        watermark_us: newest time of the rows so far less the lateness, in µs since 1970; None without times.
        late_rows: rows of this chunk that are older than the watermark before it.
    """

    number: int
    manifest: Manifest
    watermark_us: int | None
    late_rows: int


class Follower:
    """Follows the folder of `data.train`.

    Args:
        data: the folder.
        schema: of the columns to train on.
        timestamp: column with the time of the rows, for the watermark.
        ledger: folder of the ledger.
        joined: folder for the output of `follow.join`.
        landed: folder for the rows of a topic.
        tell: called once with each problem that new rows wait for.
        needed_from: the first chunk that a checkpoint may continue from.
        entries: of the ledger. When there are more, the older half, up to `needed_from`, is folded into `known.json`.
    """

    def __init__(
        self,
        data: DataSet,
        follow: FollowConfig,
        schema: Schema,
        timestamp: Timestamp | None,
        ledger: Folder,
        joined: Path,
        landed: Path,
        tell: Callable[[str], object],
        reading: FooterReading | None = None,
        needed_from: Callable[[], int] = lambda: 0,
        entries: int = 4096,
    ) -> None:
        assert isinstance(data.path, str), "checked with the config"
        self._uri = data.path if data.path.startswith(SCHEME) else None
        self._follow, self._schema, self._timestamp, self._ledger = follow, schema, timestamp, ledger
        self._folder = Path(follow.backfill or data.path) if follow.join is None else joined
        self._landed = landed
        self._topic: KafkaTopic | None = None
        self._listed_at = time.monotonic()
        # With a topic: the next offsets, the newest time of each partition, and the time of the first rows to read.
        self._offsets: Offsets | None = None
        self._partitions: dict[str, int] = {}
        self._live_from: int | None = None
        self._newest: int | None = None
        self._source, self._reading, self._tell = Path(data.path), reading or FooterReading(), tell
        self._needed_from, self._entries = needed_from, entries
        self._told: set[str] = set()
        self._join: FileJoin | None = None
        self._known: dict[str, Any] = {}
        self._incomplete = False  # a file waits to be complete
        self._next = 0  # the first chunk that the ledger does not have
        self._watermark: int | None = None
        self._read_ledger()
        self._waits_since: float | None = None

    def close(self) -> None:
        """Lets another process follow."""
        if self._topic is not None:
            self._topic.close()
            self._topic = None
        if self._join is not None:
            self._join.close()
            self._join = None

    def chunk(self, number: int) -> Chunk | None:
        """A chunk; None if its files have not arrived.

        Raises:
            DataError: a recorded chunk whose files are missing or have changed; files that cannot be trained on.
        """
        if number >= self._next and not self._take():
            self._waits_since = self._waits_since or time.monotonic()
            return None
        self._waits_since = None
        entry = self._entry(number)
        of_topic = "offsets" in entry
        folder = self._landed if of_topic else self._folder
        # The time of the last change tells nothing where the run folder was copied.
        size_only = of_topic or self._follow.join is not None
        unusable = [name for name, state in entry["files"].items() if not _is_as(folder / name, state, size_only)]
        if unusable and of_topic:
            tables = self._opened().read_again(entry["starts"], entry["offsets"])
            self._land(unusable[0], self._since(tables, entry["live_from"]))
        elif unusable:
            raise DataError(
                "data.follow: a file of the chunk in training is missing or has changed",
                file=str(folder / unusable[0]),
                fix="restore it until its rows are trained on, or start a new run with init_from this run",
            )
        manifest = Manifest.read([str(folder / name) for name in entry["files"]], self._schema, reading=self._reading)
        return Chunk(number=number, manifest=manifest, watermark_us=entry["watermark"], late_rows=entry["late_rows"])

    def next(self, number: int) -> Chunk | str | None:
        """A chunk, why the run ends instead, or None: it goes on waiting."""
        follow, started = self._follow, number < self._next
        if follow.until is not None and self._watermark is not None and not started:
            until = round(follow.until.timestamp() * 1e6)
            if self._watermark >= until:
                return f"the rows have passed {shown(until)} (data.follow.until)"
        if (chunk := self.chunk(number)) is not None:
            return chunk
        idle = None if follow.idle is None else duration_s(follow.idle)
        assert self._waits_since is not None, "set by chunk"
        if idle is not None and time.monotonic() - self._waits_since >= idle:
            return f"no new {'files' if self._uri is None else 'messages'} for {follow.idle} (data.follow.idle)"
        return None

    def wait(self, number: int, stopped: Callable[[], bool] = lambda: False) -> Chunk | str | None:
        """A chunk, after waiting for its files; why the run ends instead; None if it was stopped.

        Args:
            stopped: asked between two looks.
        """
        while (found := self.next(number)) is None and not stopped():
            self._say(f"waiting for rows in {self.awaited}")
            self.sleep()
        return found

    @property
    def awaited(self) -> str:
        """Where new rows are looked for: a topic or a folder, first one that does not exist."""
        join = self._follow.join
        if join is not None and self._source.is_dir() and not Path(join.events).is_dir():
            return f"{join.events}, which does not exist"
        return self._uri or str(self._source)

    def sleep(self) -> None:
        """Sleeps until the next look for new files."""
        time.sleep(duration_s(self._follow.poll) or 1)

    def _take(self) -> bool:
        """Records the next chunk of what has arrived; False if there is nothing."""
        if self._uri is None:
            return self._take_files()
        if self._follow.backfill is not None and self._offsets is None:
            if not self._folder.is_dir():
                problem = "data.follow.backfill: the folder does not exist"
                raise DataError(problem, file=str(self._folder), fix="correct the path, or create the folder")
            if self._take_files():
                return True
            if self._incomplete:  # the topic comes after all of the past
                return False
        try:
            return self._take_messages()
        except DataUnavailable as error:
            self._say(str(error))
            return False

    def _take_messages(self) -> bool:
        topic = self._opened()
        if self._offsets is None:
            if self._follow.backfill is not None:
                given = self._follow.live_from
                after = None if self._newest is None else self._newest + 1
                self._live_from = after if given is None else round(given.timestamp() * 1e6)
            self._offsets = topic.first_offsets(self._live_from)
        elif time.monotonic() - self._listed_at > _LIST_S:
            self._listed_at = time.monotonic()
            if added := [name for name in topic.partitions() if name not in self._offsets]:
                first = topic.first_offsets(None)
                self._offsets = {**self._offsets, **{name: first[name] for name in added}}
        until = time.monotonic() + READ_S
        while True:
            starts = self._offsets
            tables, stop = topic.read(starts, self._follow.rows)
            tables = self._since(tables, self._live_from)
            if tables:
                break
            if stop != starts:  # all rows were older
                self._offsets, self._waits_since = stop, time.monotonic()
            if stop == starts or time.monotonic() > until:
                return False
        late_rows, partitions, watermark = 0, dict(self._partitions), self._watermark
        for name, table in tables.items():
            if (times := self._times_of(table)) is not None and len(times):
                late_rows += 0 if watermark is None else int(np.count_nonzero(times < watermark))
                partitions[name] = max(int(times.max()), partitions.get(name, int(times.max())))
        # That of the partition that is behind. One of which nothing was read yet holds it, unless it is empty.
        if partitions and not topic.behind(stop, stop.keys() - partitions.keys()):
            watermark = max(min(partitions.values()) - self._lateness, _EARLIEST if watermark is None else watermark)
        name = f"{self._next:09d}.parquet"
        state = self._land(name, tables)
        entry = {
            "files": {name: state}, "watermark": watermark, "late_rows": late_rows, "newest": self._newest,
            "starts": starts, "offsets": stop, "partitions": partitions, "live_from": self._live_from,
        }  # fmt: skip
        self._ledger.write(_name(self._next), json.dumps(entry).encode())
        self._next, self._watermark, self._offsets, self._partitions = self._next + 1, watermark, stop, partitions
        (self._landed / f"{self._next - _LANDED:09d}.parquet").unlink(missing_ok=True)
        self._fold()
        return True

    def _opened(self) -> KafkaTopic:
        if self._topic is None:
            assert self._uri is not None, "only with a topic"
            self._topic = KafkaTopic(self._uri, self._schema, self._timestamp)
        return self._topic

    def _land(self, name: str, tables: Mapping[str, pa.Table]) -> State:
        """Writes the rows of all partitions, one after the other, as a file that arrives whole."""
        self._landed.mkdir(parents=True, exist_ok=True)
        hidden, path = self._landed / f".{name}", self._landed / name
        pq.write_table(together(list(tables.values()), self._uri or ""), hidden)
        sync(hidden)
        hidden.replace(path)
        return path.stat().st_size, path.stat().st_mtime_ns

    def _since(self, tables: Mapping[str, pa.Table], since_us: int | None) -> dict[str, pa.Table]:
        """The rows from a time on; without the partitions that have none."""
        kept = dict(tables)
        for name, table in tables.items():
            times = self._times_of(table)
            if since_us is not None and times is not None:
                kept[name] = table.filter(pa.array(times >= since_us))
        return {name: table for name, table in kept.items() if len(table)}

    def _times_of(self, table: pa.Table) -> I64 | None:
        """Times of rows in µs; None without a column of times.

        Raises:
            DataError: the column is missing or a time is null.
        """
        timestamp = self._timestamp
        if timestamp is None:
            return None
        if timestamp.column not in table.column_names:
            raise column_missing(timestamp.column, table.schema, self._uri or "", "add it to the messages")
        column = table[timestamp.column]
        if column.null_count:
            raise DataError("a time is null", file=self._uri, column=timestamp.column, fix="correct the producer")
        return self._micros(column, self._uri)

    def _micros(self, times: pa.ChunkedArray, file: str | None) -> I64:
        assert self._timestamp is not None, "there are times"
        column, unit = self._timestamp.column, self._timestamp.unit
        try:
            return micros_of(decoded(times.combine_chunks()), unit)
        except pa.ArrowException as error:
            problem = f"schema.timestamp: the values are not times: {first_line(error)}"
            fix = "use timestamps, texts in ISO 8601, or numbers since 1970"
            raise DataError(problem, file=file, column=column, fix=fix) from error

    @property
    def _lateness(self) -> int:
        return (duration_s(self._follow.lateness) or 0) * 1_000_000

    def _take_files(self) -> bool:
        if (self._follow.join is not None and not self._joins(self._follow.join)) or not self._folder.is_dir():
            return False
        arrived, changed = new_files(self._folder, self._known)
        for error in changed:
            self._say(str(error))
        self._incomplete, whole = False, list[Arrived]()
        for file in arrived:
            if len(whole) < self._follow.files and self._has_rows(file):
                whole.append(file)
        if not whole:
            return False
        watermark, late_rows = self._times([file.name for file in whole])
        files = {file.name: file.state for file in whole}
        entry = {"files": files, "watermark": watermark, "late_rows": late_rows, "newest": self._newest}
        self._ledger.write(_name(self._next), json.dumps(entry).encode())
        self._known |= files
        self._next, self._watermark = self._next + 1, watermark
        self._fold()
        return True

    def _has_rows(self, file: Arrived) -> bool:
        """False for a file that is not complete, or has no rows."""
        try:
            if check_whole(self._folder, file):
                return True
            self._known[file.name] = file.state
        except DataUnavailable as error:
            self._say(str(error))
            self._incomplete = True
        return False

    def _joins(self, config: JoinConfig) -> bool:
        """Joins what has arrived; False if nothing can be joined yet."""
        if not self._source.is_dir() or not Path(config.events).is_dir():
            return False
        if self._join is None:
            spec, patience = join_options(config)
            self._join = FileJoin(self._source, Path(config.events), self._folder, spec, patience)
        try:
            self._join.run()
        except (DataUnavailable, FileChanged) as error:
            self._say(str(error))
        return True

    def _times(self, names: list[str]) -> tuple[int | None, int]:
        """(the watermark after the files, rows that are older than the watermark before them)"""
        timestamp, late_rows, watermark = self._timestamp, 0, self._watermark
        if timestamp is None:
            return None, 0
        newest = None
        for name in names:
            path = str(self._folder / name)
            with open_parquet(path) as parquet:
                if timestamp.column not in parquet.schema_arrow.names:
                    continue  # the manifest names it
                column = parquet.read(columns=[timestamp.column]).column(0).drop_null()
            times = self._micros(column, path)
            if watermark is not None:
                late_rows += int(np.count_nonzero(times < watermark))
            if len(times):
                newest = max(int(times.max()), newest if newest is not None else int(times.max()))
        if newest is None:
            return watermark, late_rows
        self._newest = newest if self._newest is None else max(newest, self._newest)
        newest -= self._lateness
        return newest if watermark is None else max(newest, watermark), late_rows

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _read_ledger(self) -> None:
        names = self._ledger.names()
        numbers = sorted(int(name[:-5]) for name in names if name[:-5].isdigit())
        if _KNOWN in names:
            facts = json.loads(self._ledger.read(_KNOWN))
            self._known, self._next = facts["files"], facts["next"]
            self._restore(facts)
        for number in numbers:
            entry = json.loads(self._ledger.read(_name(number)))
            self._known |= {} if "offsets" in entry else entry["files"]
            if number >= self._next:
                self._next = number + 1
                self._restore(entry)
        self._oldest = numbers[0] if numbers else self._next
        self._fold_at = self._oldest + self._entries + 1

    def _restore(self, entry: Mapping[str, Any]) -> None:
        """Takes up the state after an entry of the ledger."""
        self._watermark, self._newest = entry["watermark"], entry["newest"]
        if entry.get("offsets") is not None:
            self._offsets, self._partitions = entry["offsets"], entry["partitions"]
            self._live_from = entry["live_from"]

    def _entry(self, number: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(self._ledger.read(_name(number)))
        except FileNotFoundError as error:
            raise DataError(
                f"data.follow: the checkpoint stands in chunk {number}, which the ledger does not have",
                file=self._ledger.path,
                fix="restore the run folder, or start a new run with init_from this run",
            ) from error
        return entry

    def _fold(self) -> None:
        """Bounds the number of entries of the ledger. Forgets files that were removed from the folder."""
        if self._next < self._fold_at:
            return
        until = max(self._oldest, min(self._next - self._entries // 2, self._needed_from()))
        # Where checkpoints need more, it is not tried again at each chunk.
        self._fold_at = max(until + self._entries, self._next + self._entries // 2) + 1
        if until == self._oldest:
            return
        files = {name: state for name, state in self._known.items() if (self._folder / name).exists()}
        facts = {
            "files": files, "next": self._next, "watermark": self._watermark, "newest": self._newest,
            "offsets": self._offsets, "partitions": self._partitions, "live_from": self._live_from,
        }  # fmt: skip
        self._ledger.write(_KNOWN, json.dumps(facts).encode())
        for number in range(self._oldest, until):
            self._ledger.remove(_name(number))
        self._known, self._oldest = files, until


def join_options(config: JoinConfig) -> tuple[JoinSpec, Patience]:
    """How `data.follow.join` joins."""

    def seconds(text: str) -> int:
        return duration_s(text) or 0

    window = seconds(config.window)
    spec = JoinSpec(
        window_s=window, late=config.late, keep_s=max(window, seconds(config.keep)), labels=tuple(config.labels),
        kind=config.kind,
    )  # fmt: skip
    return spec, Patience(lateness_s=seconds(config.lateness), idle_s=seconds(config.idle))


def shown(time_us: int) -> str:
    """A time in UTC as text."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def _is_as(path: Path, state: State, size_only: bool) -> bool:
    """Whether a file is as recorded."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_size == state[0] and (size_only or facts.st_mtime_ns == state[1])


def _name(number: int) -> str:
    return f"{number:09d}.json"
