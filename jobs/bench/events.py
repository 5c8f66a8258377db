"""Times histories that are joined from a log of events against the same histories stored in the rows.

    python jobs/bench/events.py [--events N] [--length N] [--rounds N] [--json]

Writes a log of events (Zipf users), and rows with the histories of `rayrec data sequence` from it. Prints the time and
bytes of the index; gathered events per second of processor time; and the rate of an epoch that joins histories over
that of an epoch that reads stored ones, the two in turns. One process; ids are hashed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import arguments, in_turns, machine, paired_ratio, print_json

from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema
from rayrec.data.mapping.entities import EntitySource, open_entities
from rayrec.data.tools.histories import Log, make_sequences
from rayrec.data.tools.times import TimeColumn

ROWS = 100_000


def write_log(path: Path, events: int) -> None:
    draw = np.random.default_rng(0)
    users = (draw.zipf(1.2, events) % 20_000).astype(np.int64)
    at = 1_600_000_000 + np.sort(draw.integers(0, 10_000_000, events))
    columns = {"user": users, "at": at, "item": draw.integers(0, 1_000_000, events), "label": np.zeros(events)}
    pq.write_table(pa.table(columns), path)


def schema_of(log: Path | None, length: int) -> Schema:
    """The history of items, joined from a log, or stored."""
    feature: dict[str, Any] = {"name": "history_item", "kind": "id_list", "mapping": {"kind": "hash"}}
    raw: dict[str, Any] = {"sparse": [feature | {"max_length": length}]}
    if log is not None:
        spec = {"name": "history_item", "kind": "events", "column": "user", "path": str(log), "key": "user"}
        raw["derived"] = [spec | {"time": "at", "take": "item", "at": "at", "last": length}]
    return Schema.model_validate(raw)


def epoch(rows: Path, schema: Schema) -> Callable[[], float]:
    """Processor seconds of an epoch."""
    manifest = Manifest.read(str(rows), schema)
    options = ReadOptions(reader="local")

    def read() -> float:
        start, count = time.process_time(), 0
        with BatchStream(
            manifest,
            schema,
            {"history_item": 1 << 20},
            batch_rows=4096,
            rank=0,
            world_size=1,
            cursor=Cursor.start(0),
            seed=0,
            options=options,
        ) as stream:
            for batch, _ in stream:
                count += len(batch.label)
        assert count == ROWS
        return time.process_time() - start

    return read


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_log(folder / "log.parquet", args.events)
        log = Log(user="user", times=(TimeColumn("at"),), columns=("item",))
        make_sequences([str(folder / "log.parquet")], folder / "all", log, length=args.length)
        rows = pq.read_table(folder / "all").slice(args.events - ROWS, ROWS)
        rows = rows.take(pa.array(np.random.default_rng(1).permutation(ROWS)))
        pq.write_table(rows, folder / "stored.parquet", row_group_size=16_384)
        pq.write_table(rows.select(["user", "at", "label"]), folder / "rows.parquet", row_group_size=16_384)

        start = time.perf_counter()
        source = EntitySource(str(folder / "log.parquet"), "user", "at", "s", True)
        table = open_entities(source)
        item = table.column("item")
        index_s = time.perf_counter() - start
        index_bytes = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())
        print(f"index of {args.events:,} events: {index_s:.1f} s, {index_bytes / args.events:.0f} bytes per event")

        users = rows.column("user").to_numpy()
        times = rows.column("at").cast(pa.int64()).to_numpy() * 1_000_000
        rates = []
        for _ in range(args.rounds):
            start = time.process_time()
            events, _ = table.last(users, times, args.length)
            item.take(pa.array(events))
            rates.append(len(events) / (time.process_time() - start) / 1e6)
        print(f"gathered: {statistics.median(rates):.1f} million events per second of a core")

        sides = {
            "joined": epoch(folder / "rows.parquet", schema_of(folder / "log.parquet", args.length)),
            "stored": epoch(folder / "stored.parquet", schema_of(None, args.length)),
        }
        seconds = in_turns(sides, args.rounds, warmup=1)
        ratio = paired_ratio(seconds["stored"], seconds["joined"])
        sizes = {
            side: (folder / file).stat().st_size
            for side, file in (("joined", "rows.parquet"), ("stored", "stored.parquet"))
        }
        print(
            f"epoch of {ROWS:,} rows, {len(events) / ROWS:.0f} events each: the rate with joined ones is {ratio:.2f} "
            f"of stored ones; files {sizes['joined'] / 1e6:.1f} and {sizes['stored'] / 1e6:.1f} MB"
        )
    found = {
        "index_s": index_s,
        "bytes_per_event": index_bytes / args.events,
        "gathered_M_per_s": statistics.median(rates),
    }
    print_json(args, found | {"rate_of_stored": ratio})


if __name__ == "__main__":
    main()
