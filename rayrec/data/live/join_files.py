"""`FileJoin`: joins the files of a feature log with files of label events, exactly once.

Output and state change together: a part is written under a hidden name, then the state that has read its input is
renamed into place, which commits both; then the part gets its name. A process that was killed in between is completed
by the next one, and one that was killed before reads the same files again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.live.growing_folder import Arrived, check_whole, new_files
from rayrec.data.live.label_join import BEGIN, END, JoinSpec, LabelJoin
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged, first_line
from rayrec.storage.parquet import open_parquet

_STATE = "_join"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the join waits for data, by the times in the data.

    Args:
        lateness_s: seconds by which rows and events of a source may come later than newer ones.
        idle_s: seconds by which one source may be behind the other before the join stops waiting for it.
    """

    lateness_s: float = 60.0
    idle_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a pass of the join did.

    Args:
        files: input files read.
        rows: rows written.
        waiting: rows whose window is open.
        watermark_s: time up to which everything is decided, in seconds since 1970; None: nothing yet, or all of it.
        counts: as `LabelJoin.counts`, since the start of the join.
    """

    files: int
    rows: int
    waiting: int
    watermark_s: float | None
    counts: Mapping[str, int]


class FileJoin:
    """A join of two growing folders into a third. Use it as a context manager: one process at a time may write it.

    Args:
        log: folder of the feature log's Parquet files.
        events: folder of Parquet files with label events.
        out: folder of the output, `part-….parquet`, with the state in `_join`.
        commit_rows: input rows between two commits, about; the state is written at each.

    Raises:
        DataError: another process writes to `out`, or it is the output of another join.
    """

    def __init__(
        self,
        log: Path,
        events: Path,
        out: Path,
        spec: JoinSpec,
        patience: Patience | None = None,
        commit_rows: int = 1_000_000,
    ) -> None:
        self._folders = {"log": log, "events": events}
        self._out, self._spec, self._patience = out, spec, patience or Patience()
        self._commit_rows = commit_rows
        (out / _STATE).mkdir(parents=True, exist_ok=True)
        self._lock = open(out / _STATE / "lock", "w")  # noqa: SIM115  # held until `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataError(
                "another process writes to the folder", file=str(out), fix="wait for it, or choose another --out"
            ) from error
        self._output: list[pa.Table] = []
        self._ended, self._num_files, self._num_rows = False, 0, 0
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes write to the folder."""
        self._lock.close()

    def run(self, *, final: bool = False, on_progress: Callable[[str], None] = lambda _: None) -> Joined:
        """Reads the files that have arrived, and commits the rows that are decided.

        Args:
            final: nothing more comes: decides all rows.

        Raises:
            DataError: a file that cannot be joined, or has changed since it was read. All other files are committed.
            DataUnavailable: a file is not complete. The join waits for it: call it again.
        """
        self._num_files, self._num_rows = 0, 0
        if self._ended:
            if any(arrived or changed for arrived, changed in map(self._arrived, self._folders)):
                problem = "new files came, but the join has ended (--final)"
                raise DataError(problem, file=str(self._out), fix="join them into another --out")
            return self._done()
        errors = self._read_new(on_progress)
        if errors:
            if self._num_files:
                self._commit()
            # One that waits does not hide one that needs a correction.
            raise min(errors, key=lambda error: isinstance(error, (DataUnavailable, FileChanged)))
        if final:
            self._advance(END)
            self._ended = True
        if self._num_files or final:
            self._commit()
        return self._done()

    def _done(self) -> Joined:
        watermark = self._join.watermark
        return Joined(
            files=self._num_files,
            rows=self._num_rows,
            waiting=self._join.waiting,
            watermark_s=None if watermark in (BEGIN, END) else watermark / 1e6,
            counts=dict(self._join.counts),
        )

    def _read_new(self, on_progress: Callable[[str], None]) -> list[DataError]:
        """Reads the files that have arrived; returns the errors of those that cannot be read, which are left out."""
        found = {name: self._arrived(name) for name in self._folders}
        arrived = {name: files[::-1] for name, (files, _) in found.items()}
        errors: list[DataError] = [error for _, changed in found.values() for error in changed]
        read = 0
        while any(arrived.values()):
            # The source that is behind first, so that few rows wait for the other one.
            name = min((name for name, files in arrived.items() if files), key=lambda name: self._newest[name])
            try:
                read += self._read(name, arrived[name].pop())
            except DataError as error:
                errors.append(error)
            on_progress(f"read {self._num_files:,} files; {sum(map(len, arrived.values())):,} more")
            if read >= self._commit_rows:
                self._commit()
                read = 0
        return errors

    def _arrived(self, name: str) -> tuple[list[Arrived], list[FileChanged]]:
        return new_files(self._folders[name], self._files[name])

    def _read(self, name: str, file: Arrived) -> int:
        folder = self._folders[name]
        check_whole(folder, file)
        path = str(folder / file.name)
        with open_parquet(path) as parquet:
            try:
                table = parquet.read()
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"the file cannot be read: {first_line(error)}", file=path, fix="replace it") from error
        try:
            newest = self._join.feed_rows(table) if name == "log" else self._join.feed_events(table)
        except DataError as error:
            raise error.at(path, None, error.row) from error
        except pa.ArrowException as error:
            problem = f"the columns are not those of earlier files: {first_line(error)}"
            raise DataError(problem, file=path, fix="convert the file") from error
        self._files[name][file.name] = file.state
        self._newest[name] = max(newest, self._newest[name])
        self._num_files += 1
        self._advance(self._watermark())
        return len(table)

    def _watermark(self) -> int:
        """The time up to which both sources are complete; a source that is far behind is not waited for."""
        behind, ahead = sorted(self._newest.values())
        lateness, idle = round(self._patience.lateness_s * 1e6), round(self._patience.idle_s * 1e6)
        return max(behind, ahead - idle) - lateness if ahead > BEGIN else BEGIN

    def _advance(self, watermark: int) -> None:
        rows = self._join.advance(watermark)
        if rows is not None:
            self._output.append(rows)
            self._num_rows += len(rows)

    def _open(self) -> None:
        """Takes up the last committed state, and completes or removes what a killed process left."""
        states = self._out / _STATE
        numbers = sorted(int(path.name) for path in states.iterdir() if path.name.isdigit())
        self._number = numbers[-1] if numbers else 0
        for path in self._out.glob(".part-*.parquet"):
            if path.name == f".{_part(self._number)}" and numbers:
                path.rename(self._out / _part(self._number))
            else:
                path.unlink()
        for path in states.iterdir():
            if path.is_dir() and path.name != str(self._number):
                shutil.rmtree(path)
        self._files: dict[str, dict[str, Any]] = {name: {} for name in self._folders}
        self._newest = dict.fromkeys(self._folders, BEGIN)
        self._join = LabelJoin(self._spec)
        if not numbers:
            return
        folder = states / str(self._number)
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        if facts["format"] != _FORMAT or facts["spec"] != self._spec.to_dict():
            now, then = self._spec.to_dict(), facts["spec"]
            changed = sorted(name for name in now if now[name] != then.get(name))
            problem = f"the folder has a join with another {', '.join(changed) or 'format'}"
            raise DataError(problem, file=str(self._out), fix="use the same options, or another --out")
        tables = {path.stem: pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in folder.glob("*.arrow")}
        self._join = LabelJoin.restored(self._spec, facts["join"], tables)
        self._files, self._newest, self._ended = facts["files"], facts["newest"], facts["ended"]

    def _commit(self) -> None:
        """Writes the output and the state; renaming the state commits both."""
        number, states = self._number + 1, self._out / _STATE
        hidden = self._out / f".{_part(number)}"
        if self._output:
            pq.write_table(pa.concat_tables(self._output, promote_options="permissive"), hidden)
            sync(hidden)
        new = states / f".{number}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name, table in self._join.state.items():
            with pa.OSFile(str(new / f"{name}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            sync(new / f"{name}.arrow")
        for name, files in self._files.items():  # old files of the log are removed
            folder = self._folders[name]
            self._files[name] = {file: state for file, state in files.items() if (folder / file).exists()}
        facts = {
            "format": _FORMAT, "spec": self._spec.to_dict(), "join": self._join.facts, "files": self._files,
            "newest": self._newest, "ended": self._ended,
        }  # fmt: skip
        (new / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        sync(new / "facts.json")
        new.rename(states / str(number))
        sync(states)
        if self._output:
            hidden.rename(self._out / _part(number))
            sync(self._out)
        shutil.rmtree(states / str(self._number), ignore_errors=True)
        self._number, self._output = number, []


def _part(number: int) -> str:
    return f"part-{number:09d}.parquet"


def sync(path: Path) -> None:
    """Waits until a file or the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
