"""Converts a file of item sequences to Parquet for next-item models, leave one out.

    python data/beauty/prepare.py Beauty.txt [--out data/beauty/parquet]

Each line of the file has a user and then items in order of time. The last item of a user is for the test, the second
last for validation; `train` has neither.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Items left out at the end of each sequence.
SPLITS = {"train": 2, "validation": 1, "test": 0}
FILES, MIN_ITEMS = 4, 3


def read(path: Path) -> list[list[int]]:
    """The items of each user.

    Raises:
        SystemExit: a line with something other than numbers.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            items = [int(word) for word in line.split()[1:]]
        except ValueError:
            raise SystemExit(f"{path}, line {number}: expected numbers, a user and then items") from None
        if len(items) >= MIN_ITEMS:
            rows.append(items)
    return rows


def write(rows: list[list[int]], out: Path) -> None:
    """Writes `train`, `validation` and `test`: a row per user; the newest item is the target."""
    for split, left_out in SPLITS.items():
        (out / split).mkdir(parents=True)
        lists = [row[: len(row) - left_out] for row in rows]
        for file in range(FILES):
            file_lists = lists[file::FILES]
            table = pa.table(
                {"history": pa.array(file_lists, pa.list_(pa.int64())), "label": pa.array([1] * len(file_lists))}
            )
            pq.write_table(table, out / split / f"{file}.parquet", row_group_size=1024)
    items = 1 + max(max(row) for row in rows)
    settings = {"users": len(rows), "rows of the item table": items, "interactions": sum(map(len, rows))}
    (out / "manifest.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data/beauty/parquet"))
    args = parser.parse_args()
    rows = read(args.file)
    if args.out.exists():
        shutil.rmtree(args.out)
    write(rows, args.out)
    print((args.out / "manifest.json").read_text())


if __name__ == "__main__":
    main()
