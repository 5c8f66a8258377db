"""What a rank of `test_kills.py` does; little is imported, for it is a process that is started often."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rayrec.data import BadRows, BatchStream, Cursor, DataSet, Manifest, ReadOptions
from tests.data.sets import ROWS_OF, SCHEMA

SKIP = ReadOptions(reader="local", bad_rows=BadRows(policy="skip", limit=10_000))


def train(folder: Path, cursor: dict[str, Any], rank: int, world: int, how: dict[str, Any], steps: int | None) -> None:
    """One rank: a line for each step, written when the step is done. Soon after `steps`, it waits to be killed."""
    listed = DataSet(path=str(folder / "data"), table=how.get("table")).listed()
    manifest = Manifest.read(listed, SCHEMA, filters=how["filters"], **how["limits"])
    rows = how["order"].get("in_steps_of", 12 * world) / world
    with (
        open(folder / f"rank{rank}", "ab", buffering=0) as notes,
        BatchStream(
            manifest,
            SCHEMA,
            ROWS_OF,
            rank=rank,
            world_size=world,
            cursor=Cursor.from_dict(cursor),
            seed=7,
            batch_rows=rows,
            options=SKIP,
            **how["order"],
        ) as stream,
    ):
        for number, (batch, after) in enumerate(stream, 1):
            step = {"rows": batch.sparse["row"].values().tolist(), "cursor": after.to_dict()}
            notes.write(json.dumps(step).encode() + b"\n")
            time.sleep(60 if steps is not None and number > steps + 5 else 0.002)
        notes.write(b"null\n")
