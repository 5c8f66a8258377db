"""How fast the data path is, beside bare pyarrow and beside Ray's stock reader, on the same files with the same mapping.

    python jobs/bench_data.py                 # 4M rows in a temporary folder, a table at the end
    python jobs/bench_data.py --rows 1000000 --json

The data: 26 id columns, 6 of them lists, 13 floats and a label; ids are hashed. One consumer, batches of 4096, warm cache.
Rows per second are of whole epochs from the second one on, start-up included.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import ray
import ray.data

from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema, to_batch
from rayrec.data.mapping import map_rows
from rayrec.data.problems import Problems, Unplaced
from rayrec.data.rows import collate
from rayrec.data.synthetic import SyntheticSpec, write_files
from rayrec.models.batch import Batch

BATCH_ROWS = 4096
Epoch = Callable[[], Iterator[Batch]]


def ours(
    manifest: Manifest, schema: Schema, rows_of: dict[str, int], options: ReadOptions, shuffle: bool
) -> Iterator[Batch]:
    """One epoch of the whole path."""
    with BatchStream(
        manifest,
        schema,
        rows_of,
        batch_rows=BATCH_ROWS,
        rank=0,
        world_size=1,
        cursor=Cursor.start(0),
        seed=0,
        shuffle=shuffle,
        options=options,
    ) as stream:
        for batch, _ in stream:
            yield batch


def bare_pyarrow(files: list[str], schema: Schema, rows_of: dict[str, int]) -> Iterator[Batch]:
    """One epoch of pyarrow's own batches and our mapping, in this process."""
    for batch in pads.dataset(files).to_batches(columns=schema.columns, batch_size=BATCH_ROWS):
        yield to_batch(batch, schema, rows_of)


def ray_stock(files: list[str], schema: Schema, rows_of: dict[str, int]) -> Iterator[Batch]:
    """One epoch of Ray's own reader with our mapping as its collate function."""
    dataset = ray.data.read_parquet(files, columns=schema.columns)
    yield from dataset.iter_torch_batches(batch_size=BATCH_ROWS, collate_fn=_Collate(schema, rows_of))


def _collate_class() -> type:
    from ray.data.collate_fn import ArrowBatchCollateFn

    class Collate(ArrowBatchCollateFn):
        def __init__(self, schema: Schema, rows_of: dict[str, int]) -> None:
            self._schema, self._rows_of = schema, rows_of

        def __call__(self, batch: pa.Table) -> Batch:
            return to_batch(batch, self._schema, self._rows_of)

    return Collate


_Collate = _collate_class()


def run_epochs(epoch: Epoch, epochs: int, rows: int) -> dict[str, float]:
    """Runs one epoch more than asked for, leaves the first out, and gives medians."""
    rates, firsts = [], []
    for number in range(epochs + 1):
        begin = time.perf_counter()
        first, found = 0.0, 0
        for batch in epoch():
            first = first or time.perf_counter() - begin
            found += batch.rows
        took = time.perf_counter() - begin
        assert found == rows, f"{found} rows of {rows}"
        if number:
            rates.append(rows / took)
            firsts.append(first)
    return {"rows_per_s": statistics.median(rates), "first_batch_s": statistics.median(firsts)}


def mapping_alone(files: list[str], schema: Schema, rows_of: dict[str, int]) -> dict[str, float]:
    """Rows per second of processor time in mapping and collating alone, from Arrow tables in memory."""
    table = pads.dataset(files).head(262_144, columns=schema.columns).combine_chunks()
    parts = table.to_batches(max_chunksize=65_536)
    rates, shares = [], []
    for _ in range(6):
        begin = time.process_time()
        mapping_s = 0.0
        for part in parts:
            before = time.process_time()
            rows = map_rows(part, schema, rows_of, Problems(Unplaced()))
            mapping_s += time.process_time() - before
            for start in range(0, len(rows), BATCH_ROWS):
                collate([(rows, start, min(start + BATCH_ROWS, len(rows)))], schema)
        took = time.process_time() - begin
        rates.append(table.num_rows / took)
        shares.append(mapping_s / took)
    return {"rows_per_s": statistics.median(rates[1:]), "mapping_share": statistics.median(shares[1:])}


def measure(folder: Path, rows: int, epochs: int) -> dict[str, Any]:
    """Every measurement on the files of a folder, Ray being up."""
    spec = SyntheticSpec(rows=rows)
    if not list(folder.glob("*.parquet")):
        for path in write_files(spec, folder):
            print(f"wrote {path.name}", flush=True)
    schema = Schema.model_validate(spec.schema_dict(mapping="hash"))
    rows_of = {name: max(16, size // 2) for name, size in spec.ids.items()}
    manifest = Manifest.read(str(folder), schema)
    files = [file.uri for file in manifest.files]
    through_ray, local = ReadOptions(reader="ray"), ReadOptions(reader="local")
    found: dict[str, Any] = {}
    found["full path"] = run_epochs(partial(ours, manifest, schema, rows_of, through_ray, True), epochs, rows)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["full path, files' order"] = run_epochs(
        partial(ours, manifest, schema, rows_of, through_ray, False), epochs, rows
    )
    found["in process"] = run_epochs(partial(ours, manifest, schema, rows_of, local, True), epochs, rows)
    found["bare pyarrow + mapping"] = run_epochs(partial(bare_pyarrow, files, schema, rows_of), epochs, rows)
    found["Ray's reader + mapping"] = run_epochs(partial(ray_stock, files, schema, rows_of), epochs, rows)
    found["mapping and collate alone"] = mapping_alone(files, schema, rows_of)
    rate = found["full path"]["rows_per_s"]
    return {
        "rows_per_s": rate,
        "ratio_to_pyarrow": rate / found["bare pyarrow + mapping"]["rows_per_s"],
        "ratio_to_ray_stock": rate / found["Ray's reader + mapping"]["rows_per_s"],
        "first_batch_s": found["full path"]["first_batch_s"],
        "peak_rss_bytes": peak_rss_bytes,
        "details": found,
    }


def show(found: dict[str, Any], rows: int) -> str:
    """The measurements as a dated table."""
    lines = [f"{date.today()}  {rows:,} rows, batches of {BATCH_ROWS}", f"{'':28} {'rows/s':>12} {'first batch':>12}"]
    for name, values in found["details"].items():
        first = f"{values['first_batch_s']:.2f} s" if "first_batch_s" in values else ""
        lines.append(f"{name:28} {values['rows_per_s']:>12,.0f} {first:>12}")
    lines.append(
        f"full path: {found['ratio_to_pyarrow']:.2f} x pyarrow, {found['ratio_to_ray_stock']:.2f} x Ray's reader"
    )
    lines.append(f"peak memory of the consumer with the full path: {found['peak_rss_bytes'] / 2**20:,.0f} MiB")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs of each; one more warms up")
    parser.add_argument("--data", type=Path, help="folder to keep the generated files in, used again if it has some")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray is started with")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        ray.init(num_cpus=args.cpus, include_dashboard=False, logging_level=logging.ERROR)
        try:
            found = measure(args.data or Path(temporary), args.rows, args.epochs)
        finally:
            ray.shutdown()
    print(show(found, args.rows))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
