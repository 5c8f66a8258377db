"""Times histories that are joined from a log of events against the same histories stored in the rows.

    python jobs/bench/events.py [--events N] [--length N] [--rounds N] [--json]
    python jobs/bench/events.py --store N | --requests N | --entities N

Writes a log of events (Zipf users), and rows with the histories of `rayrec data sequence` from it. Prints the time and
bytes of the index; gathered events per second of processor time; and the rate of an epoch that joins histories over
that of an epoch that reads stored ones, the two in turns. One process; ids are hashed. With `--store`, instead builds a
store of so many events with `rayrec data events`, and prints its bytes per event, the seconds, the most memory of the
process beyond that of one which builds a store of 1,000 events, and gathered events per second. With `--requests`,
instead scores so many requests of a user and 100 candidates in a service's own code, whose history is from the
export's index of the log or in the request, in turns, and prints the ratio of their 50th and 99th percentiles. With
`--entities`, the same of features of the user and of the candidates, which are from the export's tables or in the
request.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import arguments, in_turns, machine, milliseconds, paired_ratio, print_json
from ranker import Weights

from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema, to_batch
from rayrec.data.mapping.entities import EntitySource, open_entities
from rayrec.data.tools.histories import Log, make_sequences
from rayrec.data.tools.times import TimeColumn
from rayrec.inference import Inputs, Trained, export
from rayrec.models import DCN
from rayrec.modules import EmbeddingBagConfig
from rayrec.serve import ModelSpec, Service

ROWS = 100_000
FILE_EVENTS = 5_000_000


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


def build(log: Path, store: Path) -> tuple[float, int]:
    """Seconds and most memory of `rayrec data events`, in a process of its own, without pages of mapped files."""
    line = [sys.executable, "-m", "rayrec.cli", "data", "events", str(log), "--out", str(store), "--key", "user"]
    line += ["--time", "at", "--column", "item", "--column", "action", "--memory-gib", "0.5"]
    start = time.perf_counter()
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        most = most if found is None else max(most, int(found[1]) * 1024)
        time.sleep(0.02)
    assert process.returncode == 0
    return time.perf_counter() - start, most


def measure_store(folder: Path, events: int, rounds: int) -> dict[str, float]:
    draw, actions = np.random.default_rng(0), pa.array(["skip", "play", "like"])
    for name, count in (("small", 1000), ("log", events)):
        (folder / name).mkdir()
        for number, first in enumerate(range(0, count, FILE_EVENTS)):
            rows = min(FILE_EVENTS, count - first)
            columns = {
                "user": (draw.zipf(1.2, rows) % (1 + count // 4000)).astype(np.int64),
                "at": pa.array(1_600_000_000 + first + np.arange(rows), pa.timestamp("s")),
                "item": np.minimum(draw.zipf(1.1, rows), 10_000_000),
                "action": pa.DictionaryArray.from_arrays(pa.array(draw.integers(0, 3, rows, np.int8)), actions),
            }
            pq.write_table(pa.table(columns), folder / name / f"{number:05}.parquet")
    _, fixed = build(folder / "small", folder / "small-store")
    seconds, most = build(folder / "log", folder / "store")
    size = sum(file.stat().st_size for file in (folder / "store").rglob("*") if file.is_file())
    source = EntitySource(str(folder / "store"), "user", "at", "s", True)
    table, rates = open_entities(source), []
    users = pq.read_table(folder / "log" / "00000.parquet", columns=["user"]).column("user").to_numpy()[:ROWS]
    times = np.full(len(users), (1_600_000_000 + events // 2) * 1_000_000)
    for _ in range(rounds + 1):
        start = time.process_time()
        found, _ = table.last(users, times, 256)
        table.values("item", found)
        rates.append(len(found) / (time.process_time() - start) / 1e6)
    figures = {
        "events": events,
        "bytes_per_event": size / events,
        "seconds": seconds,
        "memory_mb": (most - fixed) / 1e6,
        "gathered_per_second_and_core": statistics.median(rates[1:]) * 1e6,
    }
    print(f"store of {events:,} events: {size / events:.1f} bytes per event, {seconds:.0f} s")
    gathered = statistics.median(rates[1:])
    print(f"memory: {figures['memory_mb']:,.0f} MB; gathered: {gathered:.1f} million events per second of a core")
    return figures


def measure_requests(folder: Path, events: int, length: int, requests: int) -> dict[str, float]:
    """Percentiles of requests whose history is from the index, over those of requests that bring it."""
    write_log(folder / "log.parquet", events)
    raw = schema_of(folder / "log.parquet", length).model_dump(mode="json", exclude_none=True)
    raw["sparse"].append({"name": "item", "mapping": {"kind": "hash"}})
    names, rows = ["history_item", "item"], 1 << 16
    tables = [EmbeddingBagConfig(name="item", num_embeddings=rows, embedding_dim=16, feature_names=names)]

    def make(device: str = "meta") -> DCN:
        return DCN(tables, 0, [], [64, 1], tables_device=device, seed=1)

    inputs = Inputs(tuple(names), 0, None, False)
    schema = Schema.model_validate(raw)
    log = pq.read_table(folder / "log.parquet")
    trained = Trained(
        make_model=make,
        weights=Weights(make("cpu").eval()),  # type: ignore[arg-type]
        inputs=inputs,
        mapping={"schema": raw, "tables": [{"rows": rows, "features": names}]},
        rows_of=dict.fromkeys(names, rows),
        batches=lambda count=None: [to_batch(log.slice(events - 500, 500), schema, dict.fromkeys(names, rows))],
    )
    service = Service([ModelSpec(name="ctr", path=export(trained, folder / "export").folder)])
    draw, table = (
        np.random.default_rng(1),
        open_entities(EntitySource(str(folder / "log.parquet"), "user", "at", "s", True)),
    )
    now, candidates = 1_700_000_000, {"item": draw.integers(0, 1_000_000, 100).tolist()}
    bodies: dict[str, list[bytes]] = {"from the index": [], "in the request": []}
    for user in log.column("user").to_numpy()[draw.integers(0, events, requests)].tolist():
        found, _ = table.last(np.array([user]), np.array([now * 1_000_000]), length)
        context: dict[str, Any] = {"user": user, "at": now}
        own = context | {"history_item": table.values("item", found).to_pylist()}
        for side, one in zip(bodies, (context, own), strict=True):
            bodies[side].append(json.dumps({"context": one, "candidates": candidates}).encode())
    both = [service.score(of[0], "application/json").scores["label"] for of in bodies.values()]
    assert np.array_equal(*both), "both have the same history"
    numbers = {side: iter(of * 2) for side, of in bodies.items()}
    sides = {
        side: lambda of=of: milliseconds(lambda: service.score(next(of), "application/json"))  # type: ignore[misc]
        for side, of in numbers.items()
    }
    times = in_turns(sides, requests, warmup=min(requests, 20))
    shares = {}
    for percent in (50, 99):
        index, request = (float(np.percentile(times[side], percent)) for side in bodies)
        shares[f"p{percent}_index_over_request"] = index / request
        print(f"p{percent} of 100 candidates: {index:.2f} ms with the index, {request:.2f} ms in the request")
    return shares


def measure_entities(folder: Path, requests: int) -> dict[str, float]:
    """Percentiles of requests with the ids of a user and 100 items, over those of requests with their features."""
    draw, items = np.random.default_rng(0), 1_000_000
    tables = {
        "item": {"key": np.arange(items), "price": draw.random(items), "kind": draw.integers(0, 1000, items)},
        "user": {"key": np.arange(items), "age": draw.random(items), "city": draw.integers(0, 1000, items)},
    }
    hashed, names = {"mapping": {"kind": "hash"}}, ["user", "item", "kind", "city"]
    derived = []
    for table, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{table}.parquet")
        spec = {"kind": "entity", "column": table, "path": str(folder / f"{table}.parquet"), "key": "key"}
        derived += [spec | {"name": name, "take": name} for name in [*columns][1:]]
    plain = {"dense": [{"name": "price"}, {"name": "age"}], "sparse": [{"name": name} | hashed for name in names]}
    tables_of = [EmbeddingBagConfig(name="t", num_embeddings=1 << 16, embedding_dim=16, feature_names=names)]
    rows = {name: draw.integers(0, items, 500) for name in ("user", "item")}
    whole = rows | {
        name: tables[table][name][rows[table]]
        for table, name in (("item", "price"), ("item", "kind"), ("user", "age"), ("user", "city"))
    }

    def make(device: str = "meta") -> DCN:
        torch.manual_seed(1)  # both exports have the same weights
        return DCN(tables_of, 2, [16], [64, 1], tables_device=device, seed=1)

    services = {}
    for side, raw in (("ids alone", plain | {"derived": derived}), ("features", plain)):
        schema = Schema.model_validate(raw)
        table = pa.table({"label": np.zeros(500)} | (rows if side == "ids alone" else whole))
        trained = Trained(
            make_model=make,
            weights=Weights(make("cpu").eval()),  # type: ignore[arg-type]
            inputs=Inputs(tuple(names), 2, None, False),
            mapping={
                "schema": schema.model_dump(mode="json", exclude_none=True),
                "tables": [{"rows": 1 << 16, "features": names}],
            },
            rows_of=dict.fromkeys(names, 1 << 16),
            batches=lambda count=None, t=table, s=schema: [to_batch(t, s, dict.fromkeys(names, 1 << 16))],
        )
        services[side] = Service([ModelSpec(name="ctr", path=export(trained, folder / side).folder)])
    bodies: dict[str, list[bytes]] = {side: [] for side in services}
    for _ in range(requests):
        user, chosen = int(draw.integers(0, items)), draw.integers(0, items, 100)
        ids = {"context": {"user": user}, "candidates": {"item": chosen.tolist()}}
        bodies["ids alone"].append(json.dumps(ids).encode())
        ids["context"] |= {name: tables["user"][name][user].item() for name in ("age", "city")}
        ids["candidates"] |= {name: tables["item"][name][chosen].tolist() for name in ("price", "kind")}
        bodies["features"].append(json.dumps(ids).encode())
    both = [services[side].score(of[0], "application/json").scores["label"] for side, of in bodies.items()]
    np.testing.assert_allclose(*both, rtol=1e-6)
    numbers = {side: iter(of * 2) for side, of in bodies.items()}
    sides = {
        side: lambda of=of, side=side: milliseconds(lambda: services[side].score(next(of), "application/json"))  # type: ignore[misc]
        for side, of in numbers.items()
    }
    times = in_turns(sides, requests, warmup=min(requests, 20))
    shares = {}
    for percent in (50, 99):
        alone, whole_ms = (float(np.percentile(times[side], percent)) for side in bodies)
        shares[f"p{percent}_ids_over_features"] = alone / whole_ms
        print(
            f"p{percent} of 100 candidates: {alone:.2f} ms of ids alone, {whole_ms:.2f} ms with features: "
            f"{alone / whole_ms:.2f}"
        )
    return shares


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", type=int, metavar="EVENTS")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--entities", type=int, metavar="REQUESTS")
    args = parser.parse_args()
    print(machine())
    if args.entities is not None:
        with tempfile.TemporaryDirectory() as name:
            os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
            shares = measure_entities(Path(name), args.entities)
        print_json(args, shares)
        return
    if args.requests is not None:
        with tempfile.TemporaryDirectory() as name:
            os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
            shares = measure_requests(Path(name), args.events, args.length, args.requests)
        print_json(args, shares)
        return
    if args.store is not None:
        with tempfile.TemporaryDirectory() as name:
            figures = measure_store(Path(name), args.store, args.rounds)
        print_json(args, figures)
        return
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
