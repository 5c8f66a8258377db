"""Times the mapping of rows on one core.

    python jobs/bench/mapping.py [--rows N] [--json]

Prints derived columns by kind, in million values per second of processor time (values of the result, or rows read if
these are more), the mapping of text ids of 8 to 24 characters, in million ids per second, what it saves to read texts
as dictionaries, and the mapping of schemas like those of MovieLens and Criteo, in nanoseconds per row. Values are
medians of `--repeats`; what is compared is measured in turns, and a ratio is the median of the pairs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import arguments, machine, print_json

from rayrec.data import Manifest, Schema, SparseFeature
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import InMemory, Problems
from rayrec.data.mapping.sparse import map_leaf
from rayrec.data.source.slices import read_slices, slices_of
from rayrec.storage.retries import Patience

GOAL = 2.0  # million values per second and core
WORDS = ["red", "blue", "shoes", "mens", "winter", "running", "leather", "sale", "new", "classic", "kids", "sport"]
KINDS: dict[str, dict[str, Any]] = {
    "buckets": {"kind": "buckets", "column": "price", "boundaries": [float(n) for n in range(1, 32)]},
    "buckets by log": {"kind": "buckets", "column": "price", "log_base": 2.0},
    "buckets of lists": {"kind": "buckets", "column": "prices", "boundaries": [float(n) for n in range(1, 32)]},
    "missing": {"kind": "missing", "column": "price"},
    "cross": {"kind": "cross", "columns": ["user", "hour"]},
    "cross of texts": {"kind": "cross", "columns": ["city", "hour"]},
    "cross list × one": {"kind": "cross", "columns": ["tags", "hour"]},
    "cross list × list": {"kind": "cross", "columns": ["tags", "others"]},
    "hour, UTC": {"kind": "time_part", "column": "at"},
    "hour in a zone": {"kind": "time_part", "column": "at", "zone": "America/New_York"},
    "weekday": {"kind": "time_part", "column": "at", "part": "weekday"},
    "month": {"kind": "time_part", "column": "at", "part": "month"},
    "age": {"kind": "age", "column": "before", "at": "at"},
    "lookup": {"kind": "lookup", "column": "counts", "key": "hour"},
    "expression": {"kind": "expression", "expression": "log1p(price) / (hour + 1)"},
    "tokens": {"kind": "tokens", "column": "title"},
    "tokens, 1- and 2-grams": {"kind": "tokens", "column": "title", "ngrams": [1, 2]},
    "tokens, counted": {"kind": "tokens", "column": "title", "counts": True},
    "overlap": {"kind": "overlap", "columns": ["tags", "others"]},
    "pairs": {"kind": "pairs", "column": "counts"},
}


def columns(rows: int) -> pa.Table:
    """Drawn columns of every type, lists of 10, maps of 8 entries, titles of 8 words."""
    draw = np.random.default_rng(0)

    def lists(values: Any, length: int) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), pa.array(values))

    keys = np.concatenate([draw.permutation(24)[:8] for _ in range(1000)])
    words = np.array(WORDS)[draw.integers(0, len(WORDS), (rows, 8))]
    at = draw.integers(1_600_000_000, 1_700_000_000, rows)
    return pa.table(
        {
            "price": draw.lognormal(2, 1, rows),
            "prices": lists(draw.lognormal(2, 1, rows * 10), 10),
            "user": draw.integers(0, 1 << 40, rows),
            "city": pa.array([f"city {n}" for n in range(5000)]).take(pa.array(draw.integers(0, 5000, rows))),
            "hour": draw.integers(0, 24, rows),
            "tags": lists(draw.integers(0, 1000, rows * 10), 10),
            "others": lists(draw.integers(0, 1000, rows * 10), 10),
            "at": pa.array(at, pa.timestamp("s")),
            "before": pa.array(at - draw.integers(0, 1_000_000, rows), pa.timestamp("s")),
            "counts": pa.MapArray.from_arrays(
                pa.array(np.arange(rows + 1, dtype=np.int32) * 8),
                pa.array(np.resize(keys, rows * 8)),
                pa.array(draw.random(rows * 8)),
            ),
            "title": pa.array(map(" ".join, words)),
            "label": draw.integers(0, 2, rows),
        }
    )


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The median of processor times."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return statistics.median(found)


def derived_speeds(rows: int, repeats: int) -> dict[str, float]:
    """Million values per second, by kind of derived column."""
    from rayrec.data.mapping.map_rows import one_array

    table = columns(rows)
    arrays = {name: one_array(table.column(name)) for name in table.column_names}
    found = {}
    for name, kind in KINDS.items():
        spec = {"name": "made", **kind}
        schema = Schema.model_validate({"sparse": [{"name": "x", "column": "made"}], "derived": [spec]})
        made = derive(schema.derived, arrays, Problems(InMemory()))["made"]
        inputs = [arrays[column] for column in schema.derived[0].inputs]
        read = max(len(getattr(array, "values", array)) for array in inputs)
        values = max(read, len(made.flatten()) if pa.types.is_large_list(made.type) else rows)
        taken = seconds(lambda schema=schema: derive(schema.derived, arrays, Problems(InMemory())), repeats)
        found[name] = values / taken / 1e6
    return found


def schema_times(rows: int, repeats: int) -> dict[str, float]:
    """Nanoseconds per row of the mapping, by schema."""
    draw = np.random.default_rng(0)
    found = {}
    hashed = {"kind": "hash"}
    logs = [{"kind": "clip", "lowest": 0.0}, {"kind": "log1p"}]
    criteo: dict[str, Any] = {f"i{n}": draw.integers(0, 1000, rows) for n in range(13)}
    criteo |= {f"c{n}": draw.integers(0, 1 << 32, rows) for n in range(26)}
    criteo_schema = {
        "dense": [{"name": f"i{n}", "transforms": logs} for n in range(13)],
        "sparse": [{"name": f"c{n}", "mapping": hashed} for n in range(26)],
    }
    history = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * 20), pa.array(draw.integers(0, 1682, rows * 20))
    )
    movielens: dict[str, Any] = {"user": draw.integers(0, 943, rows), "item": draw.integers(0, 1682, rows)}
    movielens |= {"liked": history, "age": draw.integers(7, 73, rows)}
    movielens_schema = {
        "dense": [{"name": "age", "transforms": [{"kind": "standardize", "mean": 34.0, "std": 12.0}]}],
        "sparse": [{"name": "user"}, {"name": "item"}, {"name": "liked", "kind": "id_list", "max_length": 20}],
    }
    for name, data, raw in (("MovieLens", movielens, movielens_schema), ("Criteo", criteo, criteo_schema)):
        schema, table = Schema.model_validate(raw), pa.table(data | {"label": draw.integers(0, 2, rows)})
        sizes = {feature.name: 1 << 20 for feature in schema.sparse}
        each = seconds(
            lambda table=table, schema=schema, sizes=sizes: map_rows(table, schema, sizes, Problems(InMemory())),
            repeats,
        )
        found[name] = each / rows * 1e9
    return found


def text_ids(distinct: int, rows: int) -> pa.Array:
    """Text ids of 8 to 24 letters, drawn evenly from as many different ones."""
    draw = np.random.default_rng(0)
    letters = draw.integers(ord("a"), ord("z") + 1, (distinct, 24), np.uint8)
    ids = [row.tobytes()[:length].decode() for row, length in zip(letters, draw.integers(8, 25, distinct), strict=True)]
    return pa.array(ids).take(pa.array(draw.integers(0, distinct, rows)))


def text_speeds(rows: int, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Million text ids per second, by mapping and number of distinct ids; version 2 / version 1 of the hash."""
    speeds, ratios = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for distinct in (1_000, 1_000_000):
            ids = text_ids(distinct, rows)
            path = Path(folder) / f"{distinct}.txt"
            path.write_text("".join(f"{text}\n" for text in ids.unique().to_pylist()))
            for layout, column in (("", ids), (", dictionary", ids.dictionary_encode())):
                mappings = {f"hash, version {law}": {"kind": "hash", "text_law": law} for law in (1, 2)}
                mappings["vocabulary"] = {"kind": "vocabulary", "path": str(path)}
                features = {
                    name: SparseFeature.model_validate({"name": "id", "mapping": raw}) for name, raw in mappings.items()
                }
                taken: dict[str, list[float]] = {name: [] for name in features}
                for _ in range(repeats):
                    for name, feature in features.items():
                        taken[name].append(seconds(lambda f=feature, c=column: map_leaf(c, f, 1 << 22), 1))
                for name, values in taken.items():
                    speeds[f"{name}: {distinct:,} ids{layout}"] = rows / statistics.median(values) / 1e6
                pairs = zip(*(taken[f"hash, version {law}"] for law in (1, 2)), strict=True)
                ratios[f"{distinct:,} ids{layout}"] = statistics.median(first / second for first, second in pairs)
    return speeds, ratios


def reading_ratios(rows: int, repeats: int) -> dict[str, float]:
    """Time to read and hash texts of a Parquet file as they are, over the time with dictionaries where texts repeat."""
    schema = Schema.model_validate({"sparse": [{"name": "id", "mapping": {"kind": "hash", "text_law": 2}}]})
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for distinct in (50, 1_000, 20_000, 1_000_000):
            path = Path(folder) / f"{distinct}.parquet"
            ids = text_ids(distinct, 4 * rows)
            pq.write_table(pa.table({"id": ids, "label": np.zeros(len(ids))}), path, row_group_size=rows)
            manifest = Manifest.read(str(path), schema)
            windows = [slices_of(manifest, number) for number in range(len(manifest.windows))]

            def read(encoded: set[str], manifest: Manifest = manifest, windows: Any = windows) -> None:
                for window in windows:
                    table, _ = read_slices(window, manifest.columns, Patience(), encoded=encoded)
                    map_rows(table, schema, {"id": 1 << 22}, Problems(InMemory()))

            pairs = [(seconds(lambda: read(set()), 1), seconds(lambda: read({"id"}), 1)) for _ in range(repeats)]
            ratios[f"{distinct:,} texts"] = statistics.median(plain / encoded for plain, encoded in pairs)
    return ratios


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(machine())
    pa.set_cpu_count(1)
    texts, ratios = text_speeds(args.rows, args.repeats)
    results = {
        "M ids/s": texts,
        "× version 1": ratios,
        "× texts as they are": reading_ratios(args.rows, args.repeats),
        "ns per row": schema_times(args.rows, args.repeats),
        "M values/s": derived_speeds(args.rows, args.repeats),
    }
    for unit, values in results.items():
        for name, value in values.items():
            slow = "  below the goal" if unit == "M values/s" and value < GOAL else ""
            print(f"{name:46} {value:8.1f} {unit}{slow}")
    print_json(args, results)


if __name__ == "__main__":
    main()
