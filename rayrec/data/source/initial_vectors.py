"""Reads vectors by id from Parquet files, for the initial rows of an embedding table, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, is_text, shown
from rayrec.data.arrays.buffers import F32, I64, Mask
from rayrec.data.arrays.lists import unnest
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.id_index import DuplicateHash, IdIndex, hashes_of
from rayrec.data.mapping.map_rows import one_array
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import Schema, SparseFeature
from rayrec.data.mapping.sparse import map_leaf
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found
from rayrec.storage.parquet import Version, open_parquet, unreadable
from rayrec.storage.retries import Patience, with_patience
from rayrec.storage.struct_fields import columns_named, leaf_columns

_BATCH_BYTES = 32 << 20
_BATCH_IDS = 65_536
# Ids outside the table, by kind of mapping. A hash has a row for every id.
_WITHOUT_ROW = {"vocabulary": "not in the vocabulary", "identity": "outside the table's rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRows:
    """What the ids of the files name.

    Args:
        ids: number of ids.
        rows: number of rows of the table that they map to.
        without_row: number of ids that map to no row of their own.
    """

    ids: int
    rows: int
    without_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialVectors:
    """Parquet files with one vector per id, for the rows of one table.

    Args:
        table: name of the table, for messages.
        path: path or URI of the files as the user gave it.
        id, vector: columns.
        feature: the mapping of this feature gives the row of an id.
        num_rows: ids map to rows `[0, num_rows)`.
        dim: width of the table.
        largest: largest absolute value in the number format of the table.
        patience: how long to retry reads.
        files: the files, in order; `with_files` finds them.
    """

    table: str
    path: str
    id: str
    vector: str
    feature: SparseFeature
    num_rows: int
    dim: int
    largest: float
    patience: Patience
    files: tuple[Found, ...] = ()

    def with_files(self) -> InitialVectors:
        """A copy with the files of the path. Checks the types of both columns in each file.

        Raises:
            DataError: no files, an unreadable file, a missing column, ids or vectors of another type.
        """
        vectors = replace(self, files=tuple(find_parquet(self.path)))
        for file in vectors.files:
            vectors._check_columns(file)
        return vectors

    def count_rows(self) -> NamedRows:
        """Maps all ids, and checks that each occurs once. Reads the column of ids only.

        Raises:
            DataError: a null id, an id that occurs twice, or no id with a row.
            DataUnavailable: the storage did not respond.
        """
        # One bit per row: a table may have a billion rows.
        seen = np.zeros(-(-self.num_rows // 8), np.uint8)
        num_ids = rows_named = with_row = 0

        def hashes() -> Iterator[npt.NDArray[np.uint64]]:
            nonlocal num_ids, rows_named, with_row
            for file in self.files:
                for first_row, batch in self._batches(file, [self.id], _BATCH_IDS):
                    ids = self._ids(batch, file.uri, first_row)
                    rows, has_row = self._rows(ids)
                    num_ids, with_row = num_ids + len(ids), with_row + int(has_row.sum())
                    rows = np.unique(rows[has_row])
                    byte, bit = rows >> 3, (1 << (rows & 7)).astype(np.uint8)
                    rows_named += int(((seen[byte] & bit) == 0).sum())
                    np.bitwise_or.at(seen, byte, bit)
                    yield hashes_of(ids if is_text(ids.type) else _int64(ids))

        with tempfile.TemporaryDirectory(prefix="rayrec-ids-") as folder:
            try:
                # Only to find equal ids, in bounded memory: the index is not needed.
                IdIndex.make(hashes(), sum(map(self._num_rows_of, self.files)), True, Path(folder) / "index")
            except DuplicateHash as error:
                raise self._repeated(*error.positions) from error
        if not rows_named:
            raise DataError(
                f"table {self.table!r}: none of the {num_ids:,} ids has a row in the table",
                file=self.path,
                column=self.id,
                fix=f"name the column of the ids that feature {self.feature.name!r} has in the training data",
            )
        return NamedRows(ids=num_ids, rows=rows_named, without_row=num_ids - with_row)

    def batches(self) -> Iterator[tuple[I64, F32]]:
        """Rows of the table `[N]` without repeats, and their vectors `[N, dim]`, in batches in the order of the files.

        Ids without a row are left out. If hashed ids collide, a row may come again in a later batch: the last vector
        in the order of the files is the one that counts.

        Raises:
            DataError: a null, a vector of another length, or a number that the table's format does not have.
            DataUnavailable: the storage did not respond.
        """
        at_once = max(1, min(_BATCH_IDS, _BATCH_BYTES // (8 * self.dim)))
        for file in self.files:
            for first_row, batch in self._batches(file, [self.id, self.vector], at_once):
                rows, has_row = self._rows(self._ids(batch, file.uri, first_row))
                vectors = self._vectors(batch, file.uri, first_row)
                positions = np.flatnonzero(has_row)[::-1]
                rows, last = np.unique(rows[positions], return_index=True)
                yield rows, vectors[positions[last]]

    def text(self, named: NamedRows, rows: int) -> str:
        """The line that reports which rows of the table start from the files.

        Args:
            rows: rows of the table.
        """
        text = f"table {self.table!r}: {named.rows:,} of {rows:,} rows start from {self.path}"
        if named.without_row:
            verb, reason = "is" if named.without_row == 1 else "are", _WITHOUT_ROW[self.feature.mapping.kind]
            text += f"; {_count(named.without_row)} {verb} {reason}"
        if shared := named.ids - named.without_row - named.rows:
            text += f"; {_count(shared)} had the same hash as another, and the last one counts"
        return text

    def _check_columns(self, file: Found) -> None:
        with with_patience(lambda: open_parquet(file.uri), file.uri, self.patience) as parquet:
            arrow = leaf_columns(parquet.schema_arrow)
        for field, column in (("id", self.id), ("vector", self.vector)):
            if column not in arrow.names:
                raise column_missing(column, arrow, file.uri, f"set tables.{self.table}.init.{field} to a column of it")
        ids = self.feature.model_copy(update={"column": self.id, "kind": "id", "default": None, "on_null": "error"})
        check_types(Schema(sparse=[ids]), arrow, file.uri, labelled=False)
        kind = arrow.field(self.vector).type
        if not is_list(kind) or not pat.is_floating(kind.value_type):
            raise DataError(
                f"table {self.table!r}: the vectors must be lists of floats; the column's type is {kind}",
                file=file.uri,
                column=self.vector,
                fix=f"name another column in tables.{self.table}.init.vector, or write lists of float32",
            )
        if pat.is_fixed_size_list(kind) and kind.list_size != self.dim:
            raise self._wrong_length(kind.list_size).at(file.uri, None, None)

    def _batches(self, file: Found, columns: Sequence[str], at_once: int) -> Iterator[tuple[int, pa.Table]]:
        """Batches of a file, each with its first row. After a transient failure, reads the file again up to there."""
        reading: Iterator[pa.RecordBatch] | None = None
        done = first_row = 0

        def read_next() -> pa.RecordBatch | None:
            nonlocal reading
            try:
                if reading is None:
                    parquet = open_parquet(file.uri, Version(file.size_bytes))
                    batches = parquet.iter_batches(at_once, columns=[*columns], use_threads=False)
                    reading = islice(batches, done, None)
                return next(reading, None)
            except (pa.ArrowInvalid, OSError) as error:
                reading = None
                raise unreadable(file.uri, error) from error

        while (batch := with_patience(read_next, file.uri, self.patience)) is not None:
            yield first_row, columns_named(batch, columns)
            done, first_row = done + 1, first_row + len(batch)

    def _num_rows_of(self, file: Found) -> int:
        with with_patience(lambda: open_parquet(file.uri), file.uri, self.patience) as parquet:
            return int(parquet.metadata.num_rows)

    def _ids(self, batch: pa.Table, uri: str, first_row: int) -> pa.Array:
        ids = decoded(one_array(batch.column(self.id)))
        if ids.null_count:
            row = int(np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError("an id is null", file=uri, row=first_row + row, column=self.id, fix="remove the row")
        return ids

    def _rows(self, ids: pa.Array) -> tuple[I64, Mask]:
        """The row of each id, and whether it has one; a row that unknown ids share belongs to none of them."""
        rows, _, outside = map_leaf(ids, self.feature, self.num_rows)
        has_row = np.ones(len(rows), np.bool_)
        if isinstance(self.feature.mapping, Vocabulary):
            has_row = rows >= self.feature.mapping.oov_rows
        if outside is not None:
            has_row[outside] = False
        return rows.astype(np.int64, copy=False), has_row

    def _vectors(self, batch: pa.Table, uri: str, first_row: int) -> F32:
        lists = unnest(one_array(batch.column(self.vector)))
        if lists.nulls is not None:
            row = first_row + int(np.flatnonzero(lists.nulls)[0])
            raise DataError("a vector is null", file=uri, row=row, column=self.vector, fix="remove the row")
        lengths = np.diff(lists.offsets)
        if len(wrong := np.flatnonzero(lengths != self.dim)):
            raise self._wrong_length(int(lengths[wrong[0]])).at(uri, None, first_row + int(wrong[0]))
        with np.errstate(over="ignore"):  # an infinite number is refused below
            numbers = lists.leaf.to_numpy(zero_copy_only=False).astype(np.float32)
        good = np.abs(numbers) <= self.largest  # false for NaN, which nulls are too
        if not good.all():
            position = int(np.flatnonzero(~good)[0])
            raise DataError(
                f"table {self.table!r}: a vector has a number that is not finite in the table's number format",
                file=uri,
                row=first_row + position // self.dim,
                column=self.vector,
                value=shown(lists.leaf, position),
                fix="replace the number, or remove the row: the table's row then keeps its random start",
            )
        vectors: F32 = numbers.reshape(-1, self.dim)
        return vectors

    def _wrong_length(self, length: int) -> DataError:
        return DataError(
            f"table {self.table!r}: a vector has {length} numbers, but the table's dim is {self.dim}",
            column=self.vector,
            fix=f"write vectors of {self.dim} numbers, or set tables.{self.table}.dim to {length}",
        )

    def _repeated(self, first: int, second: int) -> DataError:
        """The error of two ids at these positions, counted over all files, whose hashes are equal."""
        (first_file, first_row, first_id), (uri, row, repeated) = self._id_at(first), self._id_at(second)
        problem, fix = f"the id is also in row {first_row} of {first_file}", "keep one row per id"
        if repeated != first_id:
            problem, fix = f"the id has the same 64-bit hash as {first_id}", "remove one of the two rows"
        return DataError(problem, file=uri, row=row, column=self.id, value=repeated, fix=fix)

    def _id_at(self, position: int) -> tuple[str, int, str]:
        """The file, the row in it, and the id at a position."""
        for file in self.files:
            size = self._num_rows_of(file)
            if position >= size:
                position -= size
                continue
            for first_row, batch in self._batches(file, [self.id], _BATCH_IDS):
                if position < first_row + len(batch):
                    return file.uri, position, shown(batch.column(self.id), position - first_row)
        raise IndexError(position)


def _int64(ids: pa.Array) -> I64:
    numbers: I64 = ids.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def _count(ids: int) -> str:
    return "1 id" if ids == 1 else f"{ids:,} ids"
