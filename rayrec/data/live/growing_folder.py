"""Folders to which files are added while they are read. A file arrives whole: written under a hidden name (`.name`,
`_name`) and renamed, or moved into the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.storage.errors import DataError, DataUnavailable, FileChanged
from rayrec.storage.files import PARQUET
from rayrec.storage.parquet import read_footer

# The size and the time of the last change (ns) identify the contents of a file.
State = tuple[int, int]
ARRIVES_WHOLE = "write files under a hidden name such as .part.parquet, and rename them when they are complete"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A file of a folder.

    Args:
        name: path below the folder.
        state: its size and the time of its last change.
    """

    name: str
    state: State


def list_arrived(folder: Path) -> dict[str, State]:
    """Parquet files in a folder and the folders below it, by name, in the order of names. Hidden ones are left out.

    Raises:
        DataError: there is no such folder.
    """
    if not folder.is_dir():
        raise DataError("the folder does not exist", file=str(folder), fix="create it, or correct the path")
    found: dict[str, State] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in PARQUET or any(part.startswith((".", "_")) for part in name.split("/")):
            continue
        try:
            facts = path.stat()
        except FileNotFoundError:  # an old file was removed
            continue
        if path.is_file():
            found[name] = facts.st_size, facts.st_mtime_ns
    return found


def new_files(folder: Path, known: Mapping[str, Any]) -> tuple[list[Arrived], list[FileChanged]]:
    """(the files that are not known, in the order of names; an error for each known file that has changed)

    Args:
        known: the state of each known file.
    """
    found = list_arrived(folder)
    changed = [
        FileChanged(
            "the file has changed since its rows were read",
            file=str(folder / name),
            fix="restore it, and add new rows as a new file",
        )
        for name, state in found.items()
        if name in known and tuple(known[name]) != state
    ]
    return [Arrived(name, state) for name, state in found.items() if name not in known], changed


def check_whole(folder: Path, file: Arrived) -> int:
    """Checks that a file is complete; returns its rows.

    Raises:
        DataUnavailable: it is still being written, or was moved away.
    """
    path = str(folder / file.name)
    try:
        return int(read_footer(path).metadata.num_rows)
    except DataError as error:
        raise DataUnavailable(
            f"the file is not complete: {error.problem}", file=path, fix=f"waiting for it; {ARRIVES_WHOLE}"
        ) from error
