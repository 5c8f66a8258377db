"""Increments: checkpoints with only what changed since another one, their parent.

An increment has the changed rows of tables, of their optimizer state and of the maps of dynamic ids, and everything
else whole: the dense part, random states, the position in the data. With its parent, the parent's parent, and so on to
a full checkpoint, it is a checkpoint like any other: `Chain` reads it as one.

Each rank writes its rows as tensors of its own. `RANK-NUMBER` is a rectangle of a table, or a range of a map:

    rows/RANK-NUMBER                 int64 [N], changed rows of the whole table, ascending
    values/RANK-NUMBER/COLUMN/KEY    [N, ...], these rows of the tensor KEY, from this column on
    nonzero/RANK-NUMBER/SHAPE/KEY    [N], the numbers of KEY at these positions of the flat tensor; the others are 0
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from rayrec.checkpoint.contents import MAP, TABLE, TABLE_STATE
from rayrec.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError, RemovedCheckpointError
from rayrec.checkpoint.format import NONZERO, ROWS, VALUES, Index, SavedTensor, without_rows
from rayrec.checkpoint.manifest import MANIFEST, Checkpoint, Link, Manifest, read_checkpoint
from rayrec.checkpoint.ownership import base_of
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.writer import Item
from rayrec.distributed import DistributedModelParallel
from rayrec.storage.folder import Folder
from rayrec.storage.parallel import in_threads

# A chain is read from its start, so it ends when its bytes, or its number of files, make that slow.
LARGEST_SHARE, LONGEST = 0.5, 100
_READERS = 16  # threads that read ahead from an object store
_SPARSE_BYTES = 1 << 14  # smaller tensors are saved whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """The end of a chain: the checkpoint that the next increment has the changes since.

    Args:
        name: its folder.
        step: its training steps.
        sequence: number of increments before it, itself included; 0 for a full checkpoint.
        nbytes: bytes of these increments.
    """

    name: str
    step: int
    sequence: int = 0
    nbytes: int = 0

    def link(self, sha256: str) -> Link:
        """The place of the next increment, if the tip's index has this checksum."""
        return Link(parent=self.name, parent_sha256=sha256, sequence=self.sequence + 1)

    def after(self, name: str, step: int, nbytes: int) -> Tip:
        """The tip with one more increment."""
        return Tip(name=name, step=step, sequence=self.sequence + 1, nbytes=self.nbytes + nbytes)


class RowSet:
    """Tensors of this rank with the same rows, whose changes have one set of marks.

    Args:
        marks: `[rows]`, live.
        first: row of the whole tensor that the first mark is for.
        parts: key and rectangle of each tensor; a rectangle has all rows of the set.
        writes: whether this rank writes the rows, of which other ranks may have copies.
    """

    def __init__(
        self, marks: torch.Tensor, first: int, parts: Sequence[tuple[str, Rectangle]], writes: bool = True
    ) -> None:
        self.marks, self.parts = marks, list(parts)
        self._first, self._writes = first, writes
        self.rows = _positions(marks)  # changed ones
        self._row_bytes = 8 + sum(math.prod(part.tensor.shape[1:]) * part.tensor.element_size() for _, part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes of the changes."""
        return self._row_bytes * self.rows.numel() if self._writes else 0

    @property
    def full_bytes(self) -> int:
        """Bytes that this rank writes of all rows."""
        return (self._row_bytes - 8) * self.marks.numel() if self._writes else 0

    def clear(self) -> None:
        """Removes the marks; `put_back` brings them back."""
        self.marks[self.rows] = False

    def put_back(self) -> None:
        self.marks[self.rows] = True

    def items(self, name: str) -> Iterator[Item]:
        """Copies of the changed rows in host memory, to write."""
        if not self._writes or not self.rows.numel():
            return
        yield _item(f"{ROWS}/{name}", self.rows.cpu() + self._first)
        for key, part in self.parts:
            column = part.offsets[1] if len(part.offsets) > 1 else 0
            values = part.tensor.detach().index_select(0, self.rows.to(part.tensor.device))
            yield _item(f"{VALUES}/{name}/{column}/{key}", values.cpu())


def _positions(marks: torch.Tensor) -> torch.Tensor:
    if marks.is_cuda:
        return marks.nonzero().flatten()
    return torch.from_numpy(marks.numpy().nonzero()[0])  # faster than torch where few are set


def _item(key: str, tensor: torch.Tensor) -> Item:
    return Item(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def split(
    model: DistributedModelParallel,
    state: Mapping[str, Rectangles],
    changed: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
) -> tuple[list[RowSet], dict[str, Rectangles]]:
    """Splits this rank's state into sets of rows whose changes are marked, and what increments have whole.

    Args:
        state: as a full checkpoint has it.
        changed: live marks of the maps of dynamic ids, by their names.
    """
    sets, rest = list[RowSet](), dict(state)
    for position, (name, table) in enumerate(model.tables().items()):
        if table.dense:
            continue
        prefix = f"{TABLE_STATE}/{name}/"
        keys = [f"{TABLE}/{name}", *(key for key in state if key.startswith(prefix) and len(state[key].shape))]
        rectangles = [rest.pop(key).rectangles for key in keys]
        writes = not table.replicated or position % world_size == rank
        for item, *of_shard in zip(table.local, *rectangles, strict=True):
            if item.changed is None:
                raise CheckpointError(f"table {name!r}: its changes are not tracked: call `track_changes` of the model")
            sets.append(RowSet(item.changed, item.shard.rows.start, list(zip(keys, of_shard, strict=True)), writes))
    for marks, names in _by_marks(changed).items():
        keys = [f"{MAP}/{name}" for name in names]
        parts = [(key, rest.pop(key).rectangles[0]) for key in keys]
        sets.append(RowSet(changed[names[0]], parts[0][1].offsets[0], parts))
        del marks
    for key in [key for key in rest if key.startswith(f"{MAP}/") and not rest[key].rectangles]:
        del rest[key]  # this rank has none of it
    return sets, rest


def _by_marks(changed: Mapping[str, torch.Tensor]) -> dict[tuple[int, int], list[str]]:
    """Names of arrays with the same marks."""
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, marks in changed.items():
        names[marks.data_ptr(), marks.numel()].append(name)
    return names


def row_items(sets: Sequence[RowSet], rank: int) -> list[Item]:
    """Copies of the changed rows that this rank writes."""
    return [item for number, rows in enumerate(sets) for item in rows.items(f"{rank:05d}-{number:04d}")]


def take_sparse(state: dict[str, Rectangles], kind: str, rank: int) -> list[Item]:
    """Takes large tensors that are mostly zeros out of what increments have whole: sums of a metric by bins.

    Args:
        kind: first part of the keys of tensors to consider.
    """
    items = list[Item]()
    for key in [key for key in state if key.startswith(f"{kind}/")]:
        tensor = state[key].rectangles[0].tensor.detach()
        if tensor.nbytes < _SPARSE_BYTES or tensor.dtype != torch.float64:
            continue
        flat = tensor.cpu().contiguous().view(-1)
        positions = flat.view(torch.int64).nonzero().flatten()  # -0.0 is not 0
        if 4 * positions.numel() < flat.numel():
            del state[key]
            name, shape = f"{rank:05d}-{kind}-{len(items):04d}", "x".join(map(str, tensor.shape))
            items += [_item(f"{ROWS}/{name}", positions), _item(f"{NONZERO}/{name}/{shape}/{key}", flat[positions])]
    return items


class _Part(NamedTuple):
    """Changed rows of a tensor in an increment.

    Args:
        rows, values: keys in the increment.
        column: first column that it has.
    """

    rows: str
    values: str
    column: int


class _Increment:
    """The changed rows of an increment."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.parts: dict[str, list[_Part]] = defaultdict(list)
        self.sparse: dict[str, SavedTensor] = {}  # tensors of which it has what is not 0
        for name in reader.index.tensors:
            kind, _, rest = name.partition("/")
            if kind == VALUES:
                rows, column, key = rest.split("/", 2)
                self.parts[key].append(_Part(f"{ROWS}/{rows}", name, int(column)))
            elif kind == NONZERO:
                rows, shape, key = rest.split("/", 2)
                self.parts[key].append(_Part(f"{ROWS}/{rows}", name, 0))
                self.sparse[key] = replace(reader.index.tensors[name], size=tuple(map(int, shape.split("x"))))
        self._rows: dict[str, torch.Tensor] = {}

    def rows(self, name: str) -> torch.Tensor:
        """Changed rows, kept: several tensors have the same ones, and readers come back for the next block."""
        if name not in self._rows:
            self._rows[name] = self.reader.tensor(name)
        return self._rows[name]

    def changes(self, key: str, rectangles: Sequence[Rectangle]) -> Iterator[_Change]:
        """The changes of rectangles of a tensor."""
        for part in self.parts.get(key, ()):
            shape = self.reader.index.tensors[part.values].size
            for rectangle in rectangles:
                target = rectangle.tensor
                rows, start = self.rows(part.rows), rectangle.offsets[0]
                low, high = torch.searchsorted(rows, torch.tensor([start, start + target.shape[0]])).tolist()
                first, width = (rectangle.offsets[1], target.shape[1]) if target.dim() > 1 else (0, 1)
                left, right = max(first, part.column), min(first + width, part.column + math.prod(shape[1:2]))
                if low < high and left < right:
                    columns = slice(left - part.column, right - part.column)
                    target = target[:, left - first : right - first] if target.dim() > 1 else target
                    yield _Change(self.reader, part.values, slice(low, high), columns, rows[low:high] - start, target)

    def write_to(self, key: str, rectangles: Sequence[Rectangle]) -> None:
        """Overwrites the changed rows in rectangles of a tensor."""
        for change in self.changes(key, rectangles):
            change.write(change.read())


class _Change(NamedTuple):
    """Changed rows of a rectangle.

    Args:
        values: key in the increment.
        saved: rows of these values.
        columns: columns of these values.
        rows: rows of `target`.
    """

    reader: Reader
    values: str
    saved: slice
    columns: slice
    rows: torch.Tensor
    target: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.reader.tensor(self.values, self.saved)

    def borrow(self) -> torch.Tensor:
        """As `read`, but the next read of this thread overwrites the result."""
        return self.reader.borrow(self.values, self.saved)

    def write(self, values: torch.Tensor) -> None:
        target = self.target
        values = values[:, self.columns] if values.dim() > 1 else values
        target.index_copy_(0, self.rows.to(target.device), values.to(target.device, target.dtype))


class Chain:
    """Reads an increment with all that it needs, like a `Reader` of a full checkpoint.

    Args:
        readers: of the full checkpoint, and of the increments in their order, the last one being the one to read.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.readers = list(readers)
        self._base, self._last = self.readers[0], self.readers[-1]
        self.folder = self._last.folder
        self._increments = [_Increment(reader) for reader in self.readers[1:]]
        self._open = ExitStack()

    @cached_property
    def index(self) -> Index:
        """The tensors, in the form of a full checkpoint; and the files of the whole chain."""
        own = self._last.index
        whole = {key: own.tensors[key] for key in own.tensors if key in without_rows(own.tensors)}
        by_rows = (TABLE, TABLE_STATE, MAP)
        tensors: dict[str, SavedTensor] = {
            key: whole.get(key, saved)
            for key, saved in self._base.index.tensors.items()
            if key in whole or key.partition("/")[0] in by_rows
        }
        files = {
            f"{reader.folder.name}/{name}": file for reader in self.readers for name, file in reader.index.files.items()
        }
        return Index(files, {**tensors, **whole, **self._increments[-1].sparse}, version=own.version)

    def __enter__(self) -> Chain:
        for reader in self.readers:
            self._open.enter_context(reader)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._open.__exit__(kind, error, traceback)

    def fill(self, state: dict[str, Any]) -> None:
        """As `Reader.fill`."""
        whole = {key: rectangles for key, rectangles in state.items() if key in self._last.index.tensors}
        by_rows = {key: rectangles for key, rectangles in state.items() if key not in whole}
        self._last.fill(whole)
        self._base.fill(by_rows)
        for increment in self._increments:
            increment.reader.open_files()
        changes = [
            change
            for increment in self._increments
            for key, rectangles in by_rows.items()
            for change in increment.changes(key, rectangles.rectangles)
        ]  # in the order of the increments
        remote = self.folder.remote
        read = in_threads(_Change.read, changes, _READERS) if remote else map(_Change.borrow, changes)
        for change, values in zip(changes, read, strict=True):
            change.write(values)

    def tensor(self, key: str, rows: slice = slice(None)) -> torch.Tensor:
        """As `Reader.tensor`."""
        if key in self._last.index.tensors:
            return self._last.tensor(key, rows)
        if (sparse := self._increments[-1].sparse.get(key)) is not None:
            dense = torch.zeros(sparse.size, dtype=sparse.dtype)
            self._increments[-1].write_to(key, [Rectangle((0,), dense.view(-1))])
            return dense[rows]
        block = self._base.tensor(key, rows)
        start = rows.indices(self._base.index.tensors[key].size[0])[0]
        for increment in self._increments:
            increment.write_to(key, [Rectangle((start, *(0 for _ in block.shape[1:])), block)])
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of the increments."""
        return sum(file.size for reader in self.readers[1:] for file in reader.index.files.values())

    def damages(self) -> Iterator[Damage]:
        """All damage of the chain. Reads every byte."""
        for reader in self.readers:
            for damage in reader.damages():
                yield damage if reader is self._last else replace(damage, file=f"{reader.folder.name}/{damage.file}")


AnyReader: TypeAlias = Reader | Chain
"""A reader of a checkpoint, full or an increment."""


def open_reader(folder: Folder, manifest: Manifest) -> AnyReader:
    """A reader of a checkpoint, full or an increment.

    Raises:
        DamagedCheckpointError: also if a checkpoint that an increment needs is missing, or another one is in its place.
        RemovedCheckpointError: the checkpoint no longer exists.
        OSError: it cannot be read.
    """
    if manifest.link is None:
        return Reader(folder, manifest)
    root, steps, own = folder.parent(), [(folder, manifest)], manifest
    while (link := own.link) is not None:
        parent = root.sub(link.parent)
        checkpoint = read_checkpoint(parent) if base_of(link.parent) == base_of(folder.name) else None
        problem = None
        if checkpoint is None:
            problem = f"{link.parent}, which it has the changes since, is missing"
        elif checkpoint.manifest.index_sha256 != link.parent_sha256:
            problem = f"{link.parent} is not the checkpoint that it has the changes since"
        elif (0 if checkpoint.manifest.link is None else checkpoint.manifest.link.sequence) != link.sequence - 1:
            problem = f"it is number {link.sequence} of its chain, and {link.parent} is not number {link.sequence - 1}"
        if checkpoint is None or problem is not None:
            if read_checkpoint(folder) is None:  # the run removes a chain from its end on
                raise RemovedCheckpointError(folder.path)
            raise DamagedCheckpointError(steps[-1][0].path, [Damage(MANIFEST, problem or "")])
        own = checkpoint.manifest
        steps.append((parent, own))
    return Chain([Reader(each, of_each) for each, of_each in reversed(steps)])


def usable_after(error: DamagedCheckpointError, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints that do not need the damaged one, which need not be among them."""
    parents = {each.name: each.manifest.link.parent for each in candidates if each.manifest.link is not None}

    def needs(name: str | None) -> bool:
        while name is not None and name != error.name:
            name = parents.get(name)
        return name is not None

    return [checkpoint for checkpoint in candidates if not needs(checkpoint.name)]
