"""Measures an export: bytes, and milliseconds on one thread against the float model in eager mode.

python jobs/bench/inference.py --json
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import arguments, in_turns, machine, medians, milliseconds, paired_ratio, print_json, require
from ranker import KEYS, batch_of, trained_ranker

from rayrec import quant
from rayrec.inference import ExportOptions, Model, export
from rayrec.models import Batch
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.quant.check import IdCheck


def median_ms(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns."""
    return medians(in_turns({name: partial(milliseconds, call) for name, call in calls.items()}, rounds, warmup=3))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    require(shutil.which("g++"), "needs a C++ compiler to export with target aoti: apt-get install g++")
    torch.set_num_threads(1)
    keys = KEYS
    trained, source = trained_ranker(args.rows, batches=4, size=1000)
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
            Path(folder) / "cache"
        )  # so that an earlier run has compiled nothing
        begin = time.perf_counter()
        made = export(trained, Path(folder) / "int8", ExportOptions(tables="int8", target="aoti", force=True))
        results["export_s"] = time.perf_counter() - begin
        begin = time.perf_counter()
        fp32 = Model(made.folder)
        results["load_s"] = time.perf_counter() - begin
        total = sum(size for size, _ in made.index.files.values())
        dense = sum(p.numel() * 4 for n, p in source.named_parameters() if ".embedding_bags." not in n)
        # once in each of the two graphs
        results["package_overhead_bytes"] = total - made.index.files["tables.bin"][0] - 2 * dense
        results |= lookups(source.embedding_bags, keys, args)
        half = export(
            trained, Path(folder) / "bf16", ExportOptions(tables="int8", dense="bf16", target="aoti", force=True)
        )
        bf16 = Model(half.folder)
        for size in (1, 100, 1024):
            batch = batch_of(keys, args.rows, size, 1)

            def eager(batch: Batch = batch) -> Any:
                with torch.no_grad():
                    return source(batch)

            calls = {"eager": eager, "aoti": lambda b=batch: fp32.score(b), "bf16": lambda b=batch: bf16.score(b)}
            times = median_ms(calls, args.repeats if size < 1000 else args.repeats // 4)
            results |= {f"{name}_{size}_ms": value for name, value in times.items()}
            results[f"aoti_over_eager_{size}"] = times["aoti"] / times["eager"]
            results[f"bf16_over_fp32_{size}"] = times["bf16"] / times["aoti"]
    results["cpu"] = torch.backends.cpu.get_cpu_capability()  # type: ignore[assignment]
    print(machine())
    for name, value in results.items():
        print(f"{name:32} {value if isinstance(value, str) else f'{value:,.4g}'}")
    print_json(args, results)


def lookups(bags: torch.nn.Module, keys: list[str], args: argparse.Namespace) -> dict[str, float]:
    """The lookups alone: bytes and time of each format, and one nn.EmbeddingBag per table."""
    assert isinstance(bags, EmbeddingBagCollection)
    made = {kind: quant.EmbeddingBagCollection.from_float(bags, kind) for kind in ("fp32", "int8", "int4")}
    floats = 4 * 26 * args.rows * 64
    results = {f"bytes_{kind}_ratio": made[kind].places[-1].end / floats for kind in ("int8", "int4")}
    batch = batch_of(keys, args.rows, 100, 10).sparse
    one = batch_of(keys, args.rows, 100, 1).sparse
    with torch.no_grad():
        ten = median_ms({kind: lambda m=m: m(batch) for kind, m in made.items()}, args.repeats)
        calls: dict[str, Callable[[], Any]] = {"bags": lambda: bags(one), "int8": lambda: made["int8"](one)}
        single = median_ms(calls, args.repeats)
    results["int8_over_fp32_ms"] = ten["int8"] / ten["fp32"]
    results |= {f"check_over_lookup_{count}": check_over_lookup(count) for count in (len(keys), 1000)}
    results["int8_over_embeddingbag_100"] = single["int8"] / single["bags"]
    return results | {f"lookup_{kind}_10x100_ms": value for kind, value in ten.items()}


def check_over_lookup(count: int) -> float:
    """The check of the ids of one row of `count` features over the lookup, which is a call without the check."""
    keys = [f"f{i}" for i in range(count)]
    tables = [EmbeddingBagConfig(name=k, num_embeddings=1000, embedding_dim=16, feature_names=[k]) for k in keys]
    bags, check = quant.EmbeddingBagCollection.from_float(EmbeddingBagCollection(tables)), IdCheck.of_tables(tables)
    row = batch_of(keys, 1000, 1, 1).sparse
    calls = {"check": partial(milliseconds, lambda: check(row)), "all": partial(milliseconds, lambda: bags(row))}
    times = in_turns(calls, 200, warmup=20)
    return paired_ratio(times["check"], [a - b for a, b in zip(times["all"], times["check"], strict=True)])


if __name__ == "__main__":
    main()
