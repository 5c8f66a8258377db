"""Times the data path against bare pyarrow and Ray's own reader, on the same files with the same mapping.

    python jobs/bench/data_path.py                 # 4M rows in a temporary folder
    python jobs/bench/data_path.py --rows 1000000 --json

The data has 26 id columns, 6 of them lists, 13 floats and a label; ids are hashed. One consumer reads batches of 4096
from a warm cache. Rows per second are of whole epochs after the first, start-up included. Contenders take turns, and
the full path runs next to each, so that a ratio compares neighbors in time. Memory is the consumer's RSS, which counts
every page of Ray's object store that it touched. The full path uses `reader: auto`: a thread of the consumer with two
cores, Ray with `--cpus 3` or more. Bare pyarrow runs in a process of its own.
"""

from __future__ import annotations

import rayrec  # noqa: F401  before pyarrow, for Arrow's allocator

# isort: split
import logging
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import ray
import ray.data
from ray.data.collate_fn import ArrowBatchCollateFn

from rayrec._runtime.ray_internals import LOCAL_SYSTEM
from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema, to_batch
from rayrec.data.mapping.collate import collate
from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import InMemory, Problems
from rayrec.data.mapping.rows import Rows
from rayrec.data.order.epoch import row_order
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering
from rayrec.data.source.slices import read_slices
from rayrec.data.stream.reading import window_shares
from rayrec.models.batch import Batch
from rayrec.storage.retries import Patience

# isort: split
from harness import arguments, machine, print_json

from data.synthetic.clicks import SyntheticSpec, write_files

BATCH_ROWS = 4096
MIMALLOC_DEFAULT_MS = "10"  # after that long, freed pages go back to the kernel
Epoch = Callable[[], Iterator[Batch]]
Found = dict[str, float]
Run = Callable[[], Found]
Pair = tuple[Found, Found]


def ours(
    manifest: Manifest, schema: Schema, rows_of: dict[str, int], options: ReadOptions, shuffle: bool, **order: int
) -> Iterator[Batch]:
    """One epoch of the whole path; `order` has `interleave` or `in_steps_of`."""
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
        **order,
    ) as stream:
        for batch, _ in stream:
            yield batch


def bare_pyarrow(files: list[str], schema: Schema, rows_of: dict[str, int]) -> Iterator[Batch]:
    """One epoch of pyarrow's own batches and our mapping, in this process."""
    for batch in pads.dataset(files).to_batches(columns=schema.columns, batch_size=BATCH_ROWS):
        yield to_batch(batch, schema, rows_of)


@contextmanager
def by_itself() -> Iterator[ProcessPoolExecutor]:
    """A process in which Arrow's allocator is as it comes: `import rayrec` sets it for its own reading."""
    kept = os.environ["MIMALLOC_PURGE_DELAY"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        os.environ["MIMALLOC_PURGE_DELAY"] = MIMALLOC_DEFAULT_MS
        try:
            other.submit(int).result()  # starts it
        finally:
            os.environ["MIMALLOC_PURGE_DELAY"] = kept
        yield other


def epoch_of_pyarrow(files: list[str], schema: Schema, rows_of: dict[str, int], rows: int) -> Found:
    """`run_epoch` of `bare_pyarrow`."""
    return run_epoch(partial(bare_pyarrow, files, schema, rows_of), rows)


def ray_stock(files: list[str], schema: Schema, rows_of: dict[str, int]) -> Iterator[Batch]:
    """One epoch of Ray's own reader with our mapping as its collate function."""
    dataset = ray.data.read_parquet(files).select_columns(schema.columns)
    batches: Any = dataset.iter_torch_batches(batch_size=BATCH_ROWS, collate_fn=_Collate(schema, rows_of))
    yield from batches


class _Collate(ArrowBatchCollateFn):
    """Our mapping, as Ray's batch iterator calls it."""

    def __init__(self, schema: Schema, rows_of: dict[str, int]) -> None:
        self._schema, self._rows_of = schema, rows_of

    def __call__(self, batch: pa.Table) -> Any:
        return to_batch(batch, self._schema, self._rows_of)


def run_epoch(epoch: Epoch, rows: int) -> dict[str, float]:
    """Runs one epoch to its end."""
    begin = time.perf_counter()
    first, found = 0.0, 0
    for batch in epoch():
        first = first or time.perf_counter() - begin
        found += batch.rows
    if found != rows:
        raise ValueError(f"an epoch gave {found} rows of {rows}: is --data a folder of another size?")
    return {"rows_per_s": rows / (time.perf_counter() - begin), "first_batch_s": first}


def median_ratio(pairs: list[Pair]) -> float:
    """The median of one contender's rate as a multiple of another's that ran beside it."""
    return statistics.median(a["rows_per_s"] / b["rows_per_s"] for a, b in pairs)


def in_turns(contenders: dict[str, Run], whole: Run, turns: int) -> dict[str, list[Pair]]:
    """Each contender's epochs, each with the one of `whole` beside it: before it in one turn, after it in the next.

    A turn to warm up is not among them.
    """
    pairs: dict[str, list[Pair]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, run in contenders.items():
            first, second = (one() for one in ((run, whole) if turn % 2 else (whole, run)))
            if turn:
                pairs[name].append((first, second) if turn % 2 else (second, first))
    return pairs


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every number."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def mapping_alone(files: list[str], schema: Schema, rows_of: dict[str, int]) -> dict[str, float]:
    """Rows per second of one core in mapping and collating alone, from Arrow tables in memory: the median of twelve.

    The clock is this thread's: Arrow's own threads may still be busy with what was read before.
    """
    table = pq.ParquetFile(files[0]).read(columns=schema.columns, use_threads=False).slice(0, 262_144).combine_chunks()
    parts = table.to_batches(max_chunksize=65_536)
    rates, shares = [], []
    for _ in range(12):
        begin = time.thread_time()
        mapping_s = 0.0
        for part in parts:
            before = time.thread_time()
            rows = map_rows(part, schema, rows_of, Problems(InMemory()))
            mapping_s += time.thread_time() - before
            for start in range(0, len(rows), BATCH_ROWS):
                collate([(rows, start, min(start + BATCH_ROWS, len(rows)))], schema)
        took = time.thread_time() - begin
        rates.append(table.num_rows / took)
        shares.append(mapping_s / took)
    return {"rows_per_s": statistics.median(rates), "mapping_share": statistics.median(shares)}


def stages(manifest: Manifest, schema: Schema, rows_of: dict[str, int]) -> dict[str, float]:
    """Processor time of each stage of the full path in this process, nanoseconds a row, medians over eight windows."""
    times: dict[str, list[float]] = {}

    def clock(stage: str, work: Callable[[], Any], rows: int) -> Any:
        begin = time.thread_time()
        result = work()
        times.setdefault(stage, []).append((time.thread_time() - begin) / rows * 1e9)
        return result

    planner = EpochPlanner(manifest)
    part = planner.open(Cursor.start(0), Ordering(seed=0, shuffle=False), 0, 1)
    for piece in islice(window_shares(planner, part), 8):
        read = partial(read_slices, piece.slices, manifest.columns, Patience(0))
        table, _ = clock("read and decode Parquet", read, piece.rows)
        mapping = partial(map_rows, table, schema, rows_of, Problems(InMemory()))
        rows = clock("map and hash", mapping, piece.rows)
        order = clock("draw an order", partial(row_order, piece.window, piece.rows, seed=0, epoch=0), piece.rows)
        clock("map and hash, put in order", partial(mapping, order), piece.rows)
        cuts = [(start, min(start + BATCH_ROWS, piece.rows)) for start in range(0, piece.rows, BATCH_ROWS)]
        clock("collate", partial(_collate_cuts, rows, cuts, schema), piece.rows)
    return {stage: statistics.median(some) for stage, some in times.items()}


def _collate_cuts(rows: Rows, cuts: list[tuple[int, int]], schema: Schema) -> None:
    for start, stop in cuts:
        collate([(rows, start, stop)], schema)


def processor_s() -> dict[str, float]:
    """Processor seconds of this process and its descendants so far, by kind of process."""
    stats = {int(path.name): path for path in Path("/proc").iterdir() if path.name.isdigit()}
    parents, seconds, names = {}, {}, {}
    for pid, path in stats.items():
        try:
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # the process has ended
        numbers = rest.split()
        parents[pid], names[pid] = int(numbers[1]), name
        seconds[pid] = (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    below, me = {os.getpid()}, os.getpid()
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    totals: dict[str, float] = {}
    for pid in below & seconds.keys():
        task = names[pid].startswith(("ray::IDLE", "ray::Read"))
        kind = "consumer" if pid == me else "read tasks" if task else "Ray's other processes"
        totals[kind] = totals.get(kind, 0.0) + seconds[pid]
    return totals


def processes(epoch: Epoch, rows: int) -> dict[str, float]:
    """Processor time of an epoch, nanoseconds a row: of this process, of Ray's workers, of what else Ray runs."""
    before = processor_s()
    run_epoch(epoch, rows)
    return {name: (took - before.get(name, 0.0)) / rows * 1e9 for name, took in processor_s().items()}


def _write(spec: SyntheticSpec, folder: Path) -> list[Path]:
    return list(write_files(spec, folder))


def _written(spec: SyntheticSpec, folder: Path) -> None:
    """Writes the data set where the folder has none, in a process whose memory is not that of a stream."""
    if list(folder.glob("*.parquet")):
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        for path in other.submit(_write, spec, folder).result():
            print(f"wrote {path.name}", flush=True)


def _spec(rows: int) -> tuple[SyntheticSpec, Schema, dict[str, int]]:
    """The data set, its schema, and the rows of each feature's table."""
    spec = SyntheticSpec(rows=rows)
    rows_of = {name: max(16, size // 2) for name, size in spec.ids.items()}
    return spec, Schema.model_validate(spec.schema_dict(mapping="hash")), rows_of


def peak_rss_bytes(folder: Path, rows: int) -> int:
    """The most memory that this process had so far, after two epochs of the full path."""
    spec, schema, rows_of = _spec(rows)
    _written(spec, folder)
    manifest = Manifest.read(str(folder), schema)
    for _ in range(2):
        run_epoch(partial(ours, manifest, schema, rows_of, ReadOptions(), True), rows)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path, rows: int, epochs: int) -> dict[str, Any]:
    """All measurements on the files of a folder, Ray being up; memory first."""
    spec, schema, rows_of = _spec(rows)
    most_memory = peak_rss_bytes(folder, rows)
    _written(spec.model_copy(update={"files": 2, "row_group_rows": 1 << 20}), folder / "_large")
    manifest = Manifest.read(str(folder), schema)
    large = Manifest.read(str(folder / "_large"), schema)
    files = manifest.files.uris
    default, only_ray, local = ReadOptions(), ReadOptions(reader="ray"), ReadOptions(reader="local")
    whole = partial(ours, manifest, schema, rows_of, default, True)
    epochs_of: dict[str, Epoch] = {
        "full path, files' order": partial(ours, manifest, schema, rows_of, default, False),
        "full path, large row groups": partial(ours, large, schema, rows_of, default, True),
        "full path, 8 windows mixed": partial(ours, manifest, schema, rows_of, default, True, interleave=8),
        "full path, order of time": partial(ours, manifest, schema, rows_of, default, False, in_steps_of=BATCH_ROWS),
        "full path, all of it on Ray": partial(ours, manifest, schema, rows_of, only_ray, True),
        "in process": partial(ours, manifest, schema, rows_of, local, True),
        "Ray's reader + mapping": partial(ray_stock, files, schema, rows_of),
    }
    contenders: dict[str, Run] = {name: partial(run_epoch, epoch, rows) for name, epoch in epochs_of.items()}
    with by_itself() as other:
        bare = partial(other.submit, epoch_of_pyarrow, files, schema, rows_of, rows)
        contenders["bare pyarrow + mapping"] = lambda: bare().result()
        pairs = in_turns(contenders, partial(run_epoch, whole, rows), epochs)
    ratios = {name: median_ratio(some) for name, some in pairs.items()}
    found = {"full path": medians([beside for some in pairs.values() for _, beside in some])}
    found |= {name: medians([run for run, _ in some]) for name, some in pairs.items()}
    found["mapping and collate alone"] = mapping_alone(files, schema, rows_of)
    return {
        "rows_per_s": found["full path"]["rows_per_s"],
        "ratio_to_pyarrow": 1 / ratios["bare pyarrow + mapping"],
        "ratio_to_ray_stock": 1 / ratios["Ray's reader + mapping"],
        "big_row_groups_ratio": ratios["full path, large row groups"],
        "shuffle_8_ratio": ratios["full path, 8 windows mixed"],
        "ordered_ratio": ratios["full path, order of time"],
        "first_batch_s": found["full path"]["first_batch_s"],
        "peak_rss_bytes": most_memory,
        "details": found,
        "ns_per_row": stages(manifest, schema, rows_of) | processes(whole, rows),
    }


def show(found: dict[str, Any], rows: int) -> str:
    """The measurements as a dated table."""
    lines = [f"{rows:,} rows, batches of {BATCH_ROWS}", f"{'':28} {'rows/s':>12} {'first batch':>12}"]
    for name, values in found["details"].items():
        first = f"{values['first_batch_s']:.2f} s" if "first_batch_s" in values else ""
        lines.append(f"{name:28} {values['rows_per_s']:>12,.0f} {first:>12}")
    lines.append("processor time, ns a row: " + _listed(found["ns_per_row"]))
    ratios = f"{found['ratio_to_pyarrow']:.2f} x pyarrow, {found['ratio_to_ray_stock']:.2f} x Ray's reader"
    lines.append(f"full path: {ratios}")
    lines.append(
        f"as a multiple of it: row groups of a million rows {found['big_row_groups_ratio']:.2f}, "
        f"8 windows mixed {found['shuffle_8_ratio']:.2f}, in the order of time {found['ordered_ratio']:.2f}"
    )
    lines.append(f"most memory of the consumer: {found['peak_rss_bytes'] / 1e6:,.0f} MB")
    return "\n".join(lines)


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in values.items())


@contextmanager
def _ray(cpus: int, **more: Any) -> Iterator[None]:
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, **more)
    try:
        yield
    finally:
        ray.shutdown()


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs of each; one more warms up")
    parser.add_argument("--data", type=Path, help="folder to keep the generated files in, used again if it has some")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray is started with")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.data or Path(temporary)
        with _ray(args.cpus, _system_config=LOCAL_SYSTEM):
            found = measure(folder, args.rows, args.epochs)
    print(machine())
    print(show(found, args.rows))
    print_json(args, found)


if __name__ == "__main__":
    main()
