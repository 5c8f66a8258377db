"""The folder of an export: its files, its index, and checks that it is complete.

| file | |
|---|---|
| `export.json` | index: inputs, table offsets, versions, origin, size and checksum of every file; written last |
| `tables.bin` | the bytes of all tables, for mapping into memory that the processes of a machine share |
| `graph.pt2` | the torch.export graph: raw tensors and JSON |
| `aoti/` | the compiled graph (AOTInductor), unpacked, so that loading needs no temporary folder |
| `mapping.json`, `vocabularies/`, `entities/` | schema and tables, to map raw values to ids |
| `parity.json`, `parity.html` | comparison with the trained model's scores |
| `vectors.bin`, `items.arrow`, … | item vectors and ids to search (`index.py`), if the export has an index |
| `ranker/` | an export of a ranker that scores the items found, if the index was written with one |
"""

from __future__ import annotations

import fcntl
import glob
import json
import mmap
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from rayrec.inference.graph import Inputs
from rayrec.quant import TablePlace
from rayrec.storage.checksums import checksum

OLD_INDEX = "index.json"  # of item indexes before format 4
INDEX, TABLES, GRAPH, AOTI = "export.json", "tables.bin", "graph.pt2", "aoti"
MAPPING, VOCABULARIES, IDS = "mapping.json", "vocabularies", "ids"
PARITY, PARITY_PAGE, RANKER = "parity.json", "parity.html", "ranker"
# 1 has no `inputs.context`, 1 and 2 no `text_law` of hashed features, 1 to 3 no `spread_over` of vocabularies, queries
# and items. All are read.
FORMAT = 4
FORMATS = (1, 2, 3, FORMAT)

_LOCK = "export.lock"


class ExportError(ValueError):
    """An export that cannot be created, is damaged, or does not fit this machine; names the file and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """The item index of an export.

    Args:
        items, dim: Shape of the vectors.
        search: "exact", "ivf" or "hnsw".
        effort: Lists to probe (IVF) or candidates to keep (HNSW), for `k`.
        k, recall: Recall of the approximate index at k, measured with the queries in `tuned_on`; None for exact search.
        tuned: (k, effort, recall) for `k` and the largest k.
        target_recall: The recall that was asked for.
        speedup: Time of exact search divided by the time of the approximate index, for `k`.
        tuned_on: A description of the queries.
        left_out: Items that were not indexed, because the model does not know them.
    """

    items: int
    dim: int
    search: str
    effort: int | None = None
    k: int | None = None
    recall: float | None = None
    tuned: tuple[tuple[int, int, float], ...] = ()
    target_recall: float | None = None
    speedup: float | None = None
    tuned_on: str | None = None
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportIndex:
    """`export.json`.

    Args:
        inputs: Inputs of the graph.
        rows_of: feature → rows of the smallest table that reads it; ids must be below.
        table_of: feature → name of that table.
        places: Offsets of the tables in `tables.bin`.
        logit_shift: Already part of the graph; recorded for comparisons.
        dense: Number format of the dense layers.
        dense_parameters: Number of dense parameters; None if it was not recorded.
        bf16_parameters: How many of them are bf16: those that only matrix products read, except for the logits.
        targets: Graphs in the folder: "eager", and "aoti" if compiled; none in an index of vectors without a model.
        version: Unique name of the export.
        versions: Software and processor that created it.
        origin: Run, checkpoint, step, and time of the checkpoint.
        files: path → (bytes, CRC-32).
        march: Instruction set that the graph was compiled for, by the compiler's name; None if it was not recorded.
        instructions: Processor flags that the compiled graph needs.
        search: The item index; None: the export has none.
        ranker: Version of the ranker in `ranker/`; None: the export has none.
        calibration: Kind of the map of logits that is part of the graph; None: scores are as trained.
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
    dense_parameters: int | None = None
    bf16_parameters: int = 0
    march: str | None = None
    instructions: list[str] = field(default_factory=list)
    search: IndexReport | None = None
    ranker: str | None = None
    calibration: str | None = None

    @property
    def kind(self) -> str:
        """What the export is, for messages."""
        if not self.targets:
            return "an index of vectors"
        return "a ranker" if self.inputs.query is None else "a query tower"

    @property
    def trained_to(self) -> float | None:
        """Time of the checkpoint, in seconds since 1970: the model knows the data of that time. None if not known."""
        return self.origin.get("time")

    def item_index(self, folder: Path) -> IndexReport:
        """`search`.

        Raises:
            ExportError: The export, which is in `folder`, has no index.
        """
        if self.search is None:
            raise ExportError(f"{folder} is {self.kind} without an index of items; make one with `rayrec index`")
        return self.search

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **_INDEX.dump_python(self, mode="json")}

    @classmethod
    def parse(cls, data: bytes, path: str) -> ExportIndex:
        """Parses the content of the file at `path`.

        Raises:
            ExportError: Not JSON, an unknown format, or a missing or wrong field.
        """
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise ExportError(f"{path} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise ExportError(f"{path} is not the index of an export: export the run again")
        if raw.get("format") not in FORMATS:
            raise ExportError(
                f"{path}: format {raw.get('format')!r}; this rayrec reads {FORMATS}: export the run again"
            )
        try:
            return _INDEX.validate_python(raw)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            detail = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            raise ExportError(f"{path} is not the index of an export ({detail}): export the run again") from None


_INDEX = TypeAdapter(ExportIndex)


def new_version() -> str:
    """A unique name that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def versions_here() -> dict[str, str]:
    """Versions of the software that scores depend on, and the processor's vector instructions."""
    return {
        "rayrec": metadata.version("rayrec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def read_index(folder: Path) -> ExportIndex:
    """
    Raises:
        ExportError: The export is missing or incomplete.
    """
    try:
        return ExportIndex.parse((folder / INDEX).read_bytes(), str(folder / INDEX))
    except FileNotFoundError:
        if (folder / OLD_INDEX).exists():
            raise ExportError(
                f"{folder} is an index of an earlier rayrec, which was no export: write it again with "
                "`rayrec index RUN OUT`"
            ) from None
        raise ExportError(f"{folder} is not a complete export: {INDEX} is missing") from None
    except OSError as error:
        raise ExportError(f"{folder / INDEX} cannot be read: {error}") from None


def check_listed(folder: Path, files: Mapping[str, tuple[int, int]], checksums: bool = True) -> None:
    """Checks that every file exists, is complete, and is inside the folder.

    Args:
        files: path → (bytes, CRC-32).
        checksums: Also reads every file and compares its checksum.

    Raises:
        ExportError: A file is missing or damaged; names it.
    """
    for name, (size, crc) in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ExportError(f"{folder} lists {name!r}, which is outside the folder")
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise ExportError(f"{path} is missing ({error.strerror}); copy the whole folder, or export again") from None
        if actual != size:
            raise ExportError(f"{path} has {actual:,} bytes instead of {size:,}; copy it again, or export again")
        if checksums and checksum(path) != crc:
            raise ExportError(f"{path} is damaged (wrong checksum); copy it again, or export again")


def listed_files(folder: Path, known: Mapping[str, int] | None = None) -> dict[str, tuple[int, int]]:
    """Size and checksum of every file below the folder except its index.

    Args:
        known: Checksums of files that need not be read.
    """
    known, listed = known or {}, {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / INDEX):
        name = path.relative_to(folder).as_posix()
        listed[name] = (path.stat().st_size, known[name] if name in known else checksum(path))
    return listed


@dataclass(frozen=True, slots=True)
class MappedTables:
    """The tables of a file, mapped into memory that processes share.

    Args:
        data: uint8, the bytes of the file.
    """

    data: torch.Tensor
    _map: mmap.mmap

    def release(self) -> None:
        """Releases the pages that were read; the system reads them again when they are needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def disable_readahead(self) -> None:
        """Turns off readahead and huge pages, for tables that may not fit in memory."""
        self._map.madvise(mmap.MADV_RANDOM)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)


def copy_files(source: Path, names: Iterable[str], folder: Path) -> None:
    """Copies files of an export. The copies share the disk space of their sources where the file system can do so.

    They are no hard links: a file written over in place, as by `cp`, would then change other exports too.
    """
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(source / name, "rb") as file, open(folder / name, "wb") as copy:
                while os.copy_file_range(file.fileno(), copy.fileno(), 1 << 30):
                    pass
        except OSError:  # between some file systems
            shutil.copyfile(source / name, folder / name)


def map_tables(path: Path) -> MappedTables:
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return MappedTables(torch.frombuffer(mapping, dtype=torch.uint8), mapping)


def read_mapping(folder: Path) -> dict[str, Any]:
    """`schema` and `tables` of the training config, with the paths of the files that they name in the folder."""
    raw: dict[str, Any] = json.loads((folder / MAPPING).read_text(encoding="utf-8"))
    for feature in raw["schema"].get("sparse", []):
        mapping = feature.get("mapping") or {}
        if mapping.get("path") is not None:
            mapping["path"] = str(folder / mapping["path"])
    for spec in raw["schema"].get("derived", []):
        if "path" in spec:
            spec["path"] = str(folder / spec["path"])
    return raw


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """An empty hidden folder next to `out`, removed at the end. Folders of killed processes are removed as well.

    Raises:
        OSError: The folder cannot be created.
    """
    prefix = f".{out.name}."
    for lock in out.parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        _remove_unless_locked(lock)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=prefix) as folder, open(Path(folder) / _LOCK, "w") as file:
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(folder)


def _remove_unless_locked(lock: Path) -> None:
    """Removes the folder of a lock; a killed process holds no lock."""
    with suppress(OSError), open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
