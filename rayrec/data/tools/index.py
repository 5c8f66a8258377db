"""Writes the index of a data set: what all its footers say, so that no run has to read them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rayrec.data.errors import DataError
from rayrec.data.source.footer_index import FooterIndex, index_file
from rayrec.data.source.footers import FooterReading, read_footers
from rayrec.data.source.lake import TableFormat, open_table
from rayrec.data.storage.files import find_files


@dataclass(frozen=True, slots=True)
class Indexed:
    """An index: its path, and what it holds."""

    path: str
    files: int
    row_groups: int
    rows: int


def write_index(
    paths: Sequence[str],
    out: str | None = None,
    columns: Collection[str] | None = None,
    table: TableFormat | None = None,
) -> Indexed:
    """Reads the footers of files that are new or changed, and writes what all say.

    Args:
        paths: files, folders, globs; local or URIs.
        out: path or URI of the index; default: in the folder, where runs look for it.
        table: each path is a table of this format, whose newest version is read.
        columns: whose smallest and largest values are kept, for filters; default: all that have some.

    Raises:
        DataError: files that cannot be read, or an index that cannot be written.
    """
    if out is None and (len(paths) > 1 or table is not None):
        what = "a table has no folder of its own" if table is not None else "several paths have no folder of their own"
        raise DataError(f"{what} for the index", fix="name its file: --out FILE")
    place = index_file(paths[0]) if out is None else out
    index = FooterIndex.open(place)
    opened = [] if table is None else [open_table(table, path) for path in paths]
    found = [file for one in opened for file in one.files(one.newest()).files] or find_files(list(paths))
    facts = read_footers(found, columns, FooterReading(index))
    if not index.save():
        raise DataError("the index cannot be written", file=place, fix="name a file that can be: --out FILE")
    groups = facts["group_rows"].combine_chunks().flatten()
    return Indexed(place, len(facts), len(groups), sum(groups.to_numpy().tolist()))
