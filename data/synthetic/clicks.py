"""Synthetic Criteo-like click logs of any size, with a planted signal, so that AUC is meaningful.

A file depends on the spec and its number only, so files can be written anywhere and in any order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rayrec._runtime.strict import Strict
from rayrec.data.arrays.hashing import mix64_array, seed_of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_CHUNK_ROWS = 65_536


class SyntheticSpec(Strict):
    """Parameters of the generated data.

    Args:
        rows: rows in all files.
        files: number of files, of nearly equal size.
        row_group_rows: rows of a row group.
        single, multi: number of features with one id per row, and with a list of ids.
        dense: number of dense features.
        smallest, largest: number of ids of the smallest and the largest feature; the others are spaced logarithmically.
        max_list: maximum list length; lengths are uniform from 0.
        positives: approximate fraction of rows with label 1.
        signal: strength of the dependence of the label on the features: 0 is noise (AUC 0.5), 1 allows an AUC of about
            0.8.
        seed: seed of the data.
    """

    rows: int = Field(default=1_000_000, ge=1)
    files: int = Field(default=8, ge=1)
    row_group_rows: int = Field(default=65_536, ge=1)
    single: int = Field(default=20, ge=0)
    multi: int = Field(default=6, ge=0)
    dense: int = Field(default=13, ge=0)
    smallest: int = Field(default=10, ge=1)
    largest: int = Field(default=1_000_000, ge=1)
    max_list: int = Field(default=7, ge=0)
    positives: float = Field(default=0.25, gt=0, lt=1)
    signal: float = Field(default=1.0, ge=0)
    seed: int = 0

    @property
    def ids(self) -> dict[str, int]:
        """Number of ids by feature, single-id features first."""
        names = [f"id_{n}" for n in range(self.single)] + [f"ids_{n}" for n in range(self.multi)]
        sizes = np.geomspace(self.smallest, self.largest, len(names)).round().astype(int).tolist()
        # Alternate small and large features, so that single and multi features have both.
        alternating = [sizes[i // 2] if i % 2 == 0 else sizes[-1 - i // 2] for i in range(len(names))]
        return dict(zip(names, alternating, strict=True))

    def schema_dict(self, mapping: str = "identity") -> dict[str, object]:
        """The schema of the generated files for a train config."""
        return {
            "label": {"column": "label"},
            "dense": [{"name": f"dense_{n}", "transforms": [{"kind": "log1p"}]} for n in range(self.dense)],
            "sparse": [
                {"name": name, "kind": "id_list" if name.startswith("ids") else "id", "mapping": {"kind": mapping}}
                for name in self.ids
            ],
        }


def write_files(spec: SyntheticSpec, folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Writes all files; yields each path when it is complete."""
    for number in range(spec.files):
        yield write_file(spec, folder, number)


def write_file(spec: SyntheticSpec, folder: str | os.PathLike[str], number: int) -> Path:
    """Writes one of the files, in chunks of rows.

    Returns:
        its path, `part-00000.parquet` and so on; the file gets this name when it is complete.
    """
    path = Path(folder) / f"part-{number:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"_{path.name}.part")
    writer: pq.ParquetWriter | None = None
    pending: pa.Table | None = None
    for table, _ in _chunks(spec, number):
        writer = writer or pq.ParquetWriter(partial, table.schema)
        pending = table if pending is None else pa.concat_tables([pending, table])
        complete_rows = len(pending) // spec.row_group_rows * spec.row_group_rows
        if complete_rows:
            writer.write_table(pending.slice(0, complete_rows), row_group_size=spec.row_group_rows)
            pending = pending.slice(complete_rows)
    assert writer is not None and pending is not None
    if len(pending):
        writer.write_table(pending)
    writer.close()
    partial.rename(path)
    return path


def best_auc(spec: SyntheticSpec, number: int) -> float | None:
    """AUC of the probabilities from which the labels of a file were drawn: the upper bound for any model.

    None if all labels are equal.
    """
    chunks = [(table.column("label").to_numpy(), probability) for table, probability in _chunks(spec, number)]
    label, probability = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
    positives = int(label.sum())
    if positives in (0, len(label)):
        return None
    ranks = np.empty(len(label))
    ranks[np.argsort(probability)] = np.arange(1, len(label) + 1)  # no ties: the distribution is continuous
    pairs = positives * (len(label) - positives)
    return float((ranks[label == 1].sum() - positives * (positives + 1) / 2) / pairs)


def _chunks(spec: SyntheticSpec, number: int) -> Iterator[tuple[pa.Table, F64]]:
    first_row, last_row = (spec.rows * n // spec.files for n in (number, number + 1))
    rng = np.random.default_rng([spec.seed, number])
    for start in range(first_row, max(last_row, first_row + 1), _CHUNK_ROWS):
        yield _draw(spec, min(_CHUNK_ROWS, last_row - start), rng)


def make_table(spec: SyntheticSpec, rows: int, rng: np.random.Generator) -> pa.Table:
    """A table in memory with columns `label`, `dense_0` …, `id_0` …, `ids_0` …."""
    return _draw(spec, rows, rng)[0]


def _draw(spec: SyntheticSpec, rows: int, rng: np.random.Generator) -> tuple[pa.Table, F64]:
    """Rows, and the probability of label 1 for each."""
    columns: dict[str, pa.Array] = {}
    logits = np.zeros(rows)
    for n in range(spec.dense):
        numbers = rng.lognormal(1.0, 1.0, rows)
        logits += (np.log1p(numbers) - 1.4) * _effect(np.array([n]), spec, 1)[0]
        columns[f"dense_{n}"] = pa.array(numbers.astype(np.float32))
    for number, (name, size) in enumerate(spec.ids.items()):
        if name.startswith("ids"):
            lengths = rng.integers(0, spec.max_list + 1, rows)
            offsets = np.zeros(rows + 1, dtype=np.int32)
            np.cumsum(lengths, out=offsets[1:])
            values = _power_law(size, int(offsets[-1]), rng)
            sums = np.bincount(np.repeat(np.arange(rows), lengths), _effect(values, spec, 2 + number), minlength=rows)
            logits += sums / np.maximum(lengths, 1)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        else:
            values = _power_law(size, rows, rng)
            logits += _effect(values, spec, 2 + number)
            columns[name] = pa.array(values)
    scale = spec.signal * 1.2 / max(1.0, (spec.dense + len(spec.ids)) ** 0.5)
    bias = np.log(spec.positives / (1 - spec.positives))
    probability = 1 / (1 + np.exp(-(bias + scale * logits)))
    label = rng.random(rows) < probability
    return pa.table({"label": pa.array(label.astype(np.int8)), **columns}), probability


def _power_law(size: int, count: int, rng: np.random.Generator) -> I64:
    """Ids in `[0, size)`; the frequency of id k is proportional to 1 / (k + 1)."""
    return np.minimum(np.power(float(size + 1), rng.random(count)) - 1, size - 1).astype(np.int64)


def _effect(ids: I64, spec: SyntheticSpec, feature: int) -> F64:
    """The effect of each id on the logit: uniform in ±√3, a function of seed, feature and id."""
    unit = mix64_array(ids, seed_of(spec.seed, feature)) / float(1 << 64)
    return (unit - 0.5) * 2 * 3**0.5
