"""Counts the rows of a data set that pass its filters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import numpy as np

from rayrec.data.source.filters import Condition
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.slices import Columns, FileSlice, RowGroupStreams, passing, read_slices, slices_of
from rayrec.storage.parallel import each
from rayrec.storage.retries import Patience

_WINDOWS_PER_TASK = 8


def count_rows(manifest: Manifest, patience: Patience) -> int:
    """Rows that pass the manifest's filters; unreadable rows count as passing. Reads in parallel, on Ray if it runs."""
    if not manifest.filters:
        return manifest.rows - manifest.deleted_rows
    filtered = {condition.column for condition in manifest.filters}
    columns = tuple((name, kind) for name, kind in manifest.columns if name in filtered)
    windows = range(len(manifest.windows))
    chunks = (windows[first : first + _WINDOWS_PER_TASK] for first in windows[::_WINDOWS_PER_TASK])
    tasks = ([slices_of(manifest, number) for number in numbers] for numbers in chunks)
    return sum(each(partial(_passing, columns=columns, filters=manifest.filters, patience=patience), tasks))


def _passing(
    windows: Sequence[Sequence[FileSlice]], columns: Columns, filters: Sequence[Condition], patience: Patience
) -> int:
    count = 0
    with closing(RowGroupStreams()) as streams:
        for slices in windows:
            table, missing = read_slices(slices, columns, patience, streams)
            count += int(np.count_nonzero(passing(slices, table, missing, filters)))
    return count
