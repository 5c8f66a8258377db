"""`rayrec data check --rows` of a folder of 100 GB.

    python jobs/bench_data_scale.py [--files 1000] [--rows 1000000] [--json]

One file of about 100 MB, and so many hard links to it: the folder has that many files of that size by name, of which
the disk, and its cache, hold one; reading from a disk is not in the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROWS = 2_600_000  # of five columns of 8 bytes that do not compress
CONFIG = {
    "name": "scale",
    "schema": {
        "label": {"column": "label"},
        "dense": [{"name": "price"}],
        "sparse": [{"name": name, "mapping": {"kind": "hash"}} for name in "abcd"],
    },
    "tables": [{"name": name, "rows": 100_000, "dim": 8, "features": [name]} for name in "abcd"],
    "model": {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 1]}},
    "trainer": {"num_workers": 0, "batch_size": 1024, "epochs": 1},
}


def make(folder: Path, files: int) -> int:
    """Bytes of the folder, by the names in it."""
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 1 << 62, ROWS) for name in "abcd"}
    columns |= {"price": rng.random(ROWS), "label": rng.integers(0, 2, ROWS)}
    folder.mkdir()
    first = folder / "0.parquet"
    pq.write_table(pa.table(columns), first, row_group_size=131_072, use_dictionary=False, compression="none")
    for number in range(1, files):
        os.link(first, folder / f"{number}.parquet")
    return files * first.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print one object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make(folder / "data", given.files)
        config = {**CONFIG, "data": {"train": str(folder / "data")}, "storage": {"path": str(folder / "runs")}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-c", "import sys; from rayrec.cli import run; sys.exit(run(sys.argv[1:]))"]
        began = time.perf_counter()
        check = ["data", "check", str(folder / "config.yaml"), "--rows", str(given.rows), "--json"]
        done = subprocess.run([*command, *check], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        found = {"gigabytes": size / 1e9, "files": given.files, "rows": json.loads(done.stdout)["rows"], "s": seconds}
    print(json.dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
