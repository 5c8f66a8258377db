"""Lists the ids that have rows in a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayrec.checkpoint.reader import CheckpointWeights
from rayrec.train.after.export import find_checkpoint, parsed_config
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.setup.dynamic_ids import maps_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRow:
    """An id with a row of its own.

    Args:
        table: first table of those that share the row.
        id: the id; of a string, its 64-bit hash.
        row: row of the table.
        count: number of lookups that the table remembers.
        last_seen: seconds since 1970 of the last lookup; without `time`, the number of the step.
    """

    table: str
    id: int
    row: int
    count: int
    last_seen: int


def ids_of_run(source: str | Path, checkpoint: str = NEWEST) -> Iterator[IdRow]:
    """The ids that have rows in a checkpoint of a run, in the order of the rows.

    Raises:
        TrainError: no table of the run has dynamic ids.
    """
    folder, found = find_checkpoint(Path(source), checkpoint)
    config = parsed_config(folder)
    if not config.data_schema.dynamic:
        raise TrainError(f"{source}: no table has dynamic ids (mapping: {{kind: dynamic}})")
    maps = maps_of(config, CheckpointWeights(found.path))
    for shared, own in zip(maps.shared, maps.maps, strict=True):
        listed = own.listing()
        columns = (listed.ids, listed.rows, listed.counts, listed.last_seen)
        for key, row, count, seen in zip(*(column.tolist() for column in columns), strict=True):
            yield IdRow(table=shared.name, id=key, row=row, count=count, last_seen=seen)
