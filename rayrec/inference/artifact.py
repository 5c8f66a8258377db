"""The folder of an exported model: its files, what its index says, and the proof that they are whole.

| file | |
|---|---|
| `export.json` | inputs, where each table lies, versions, origin, size and checksum of every file; written last |
| `tables.bin` | all tables' bytes, to be mapped into memory; processes of a machine share them |
| `graph.pt2` | the graph of torch.export: raw tensors and JSON |
| `aoti/` | the compiled graph (AOTInductor), unpacked, so that loading it leaves nothing in a temporary folder |
| `mapping.json`, `vocabularies/` | schema and tables, from which raw values become ids |
| `parity.json`, `parity.html` | scores beside the trainer's |
"""

from __future__ import annotations

import fcntl
import glob
import json
import mmap
import platform
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from rayrec.inference.graph import Inputs
from rayrec.quant import TablePlace

INDEX, TABLES, GRAPH, AOTI = "export.json", "tables.bin", "graph.pt2", "aoti"
MAPPING, VOCABULARIES, PARITY, PARITY_PAGE = "mapping.json", "vocabularies", "parity.json", "parity.html"
FORMAT = 2  # 1 knew no context: such folders, of which none has one, are read as well
FORMATS = (1, FORMAT)

_CHUNK_BYTES = 16 << 20
_LOCK = "export.lock"


class ExportError(ValueError):
    """An export that cannot be made, is damaged, or does not fit this machine; the text names the file and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What `export.json` says.

    Args:
        inputs: of the graph.
        rows_of: feature → rows of the smallest table that reads it; every id lies below.
        table_of: feature → that table.
        places: the tables in `tables.bin`.
        logit_shift: already part of the graph; recorded for comparisons.
        dense: number format of the dense layers.
        targets: the graphs that are there, "eager" and perhaps "aoti".
        version: a name for this export, unique.
        versions: of the software that made it, and the processor.
        origin: run, checkpoint and step.
        files: path → (bytes, CRC-32).
        march: instruction set that the graph was compiled for, by the compiler's name; None where none was recorded.
        instructions: the processor flags that it needs.
    """

    inputs: Inputs
    rows_of: dict[str, int]
    table_of: dict[str, str]
    places: list[TablePlace]
    logit_shift: float
    dense: str
    targets: list[str]
    version: str
    versions: dict[str, str]
    origin: dict[str, Any]
    files: dict[str, tuple[int, int]]
    march: str | None = None
    instructions: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **_INDEX.dump_python(self, mode="json")}

    @classmethod
    def parse(cls, data: bytes, place: str) -> Index:
        """What the file at `place` holds.

        Raises:
            ExportError: no JSON, another version of the format, or a part is missing.
        """
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise ExportError(f"{place} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise ExportError(f"{place} is not the index of an export: export anew")
        if raw.get("format") not in FORMATS:
            raise ExportError(
                f"{place}: format {raw.get('format')!r}; this rayrec reads {FORMATS}: export the run anew"
            )
        try:
            return _INDEX.validate_python(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ExportError(f"{place} is not the index of an export ({wrong}): export anew") from None


_INDEX = TypeAdapter(Index)


def versions_here() -> dict[str, str]:
    """Software that scores depend on, and the processor's widest vectors."""
    return {
        "rayrec": metadata.version("rayrec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def read_index(folder: Path) -> Index:
    """
    Raises:
        ExportError: no whole export is there.
    """
    try:
        return Index.parse((folder / INDEX).read_bytes(), str(folder / INDEX))
    except FileNotFoundError:
        raise ExportError(f"{folder} holds no whole export: it has no {INDEX}") from None
    except OSError as error:
        raise ExportError(f"{folder / INDEX} cannot be read: {error}") from None


def check_listed(folder: Path, files: Mapping[str, tuple[int, int]], checksums: bool = True) -> None:
    """That every file is there, whole, and inside the folder.

    Args:
        files: path → (bytes, CRC-32).

    Raises:
        ExportError: names the file.
    """
    for name, (size, crc) in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ExportError(f"{folder} lists {name!r}, which is outside the folder")
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ExportError(f"{path} is missing ({error.strerror}); copy the whole folder, or export anew") from None
        if found != size:
            raise ExportError(f"{path} has {found:,} bytes instead of {size:,}; copy it again, or export anew")
        if checksums and checksum(path) != crc:
            raise ExportError(f"{path} is damaged: its checksum is another; copy it again, or export anew")


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def listed_files(folder: Path, known: Mapping[str, int] | None = None) -> dict[str, tuple[int, int]]:
    """Every file below the folder but the index, with size and checksum; `known` ones are not read again."""
    known, listed = known or {}, {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != INDEX):
        name = path.relative_to(folder).as_posix()
        listed[name] = (path.stat().st_size, known[name] if name in known else checksum(path))
    return listed


@dataclass(frozen=True, slots=True)
class MappedTables:
    """Tables in a file, in memory that all processes share which only read it.

    Args:
        data: uint8, the file's bytes.
    """

    data: torch.Tensor
    _map: mmap.mmap

    def release(self) -> None:
        """Gives the pages that were read back to the system; they are read anew when they are needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def read_rows_alone(self) -> None:
        """Lookups read and map no neighbours of their rows: for tables that may not fit in memory."""
        self._map.madvise(mmap.MADV_RANDOM)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)


def map_tables(path: Path) -> MappedTables:
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return MappedTables(torch.frombuffer(held, dtype=torch.uint8), held)


def read_mapping(folder: Path) -> dict[str, Any]:
    """`schema` and `tables` of the training config, vocabularies being those in the folder."""
    raw: dict[str, Any] = json.loads((folder / MAPPING).read_text(encoding="utf-8"))
    for feature in raw["schema"].get("sparse", []):
        mapping = feature.get("mapping") or {}
        if mapping.get("kind") == "vocabulary":
            mapping["path"] = str(folder / mapping["path"])
    return raw


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """An empty hidden folder next to `out`, removed at the end.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".{out.name}."
    for lock in out.parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        _remove_unless_held(lock)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=prefix) as made, open(Path(made) / _LOCK, "w") as held:
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(made)


def _remove_unless_held(lock: Path) -> None:
    """A process that ended in whatever way holds no lock."""
    with suppress(OSError), open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
