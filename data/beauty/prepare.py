"""Turns a file of item sequences that you have into Parquet for next-item models, leave one out.

    python data/beauty/prepare.py Beauty.txt [--out data/beauty/parquet]

Each line of the file holds a user, then items in order of time. A user's last item is for the test, the one before for
validation; neither is in `train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PARTS = {"train": 2, "validation": 1, "test": 0}  # items left out at the end
FILES, LEAST = 4, 3


def read(path: Path) -> list[list[int]]:
    """The users' items.

    Raises:
        SystemExit: a line that is not numbers; names it.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            items = [int(word) for word in line.split()[1:]]
        except ValueError:
            raise SystemExit(f"{path}, line {number}: numbers are needed, a user and then items") from None
        if len(items) >= LEAST:
            rows.append(items)
    return rows


def write(rows: list[list[int]], out: Path) -> None:
    """`train`, `validation` and `test`; a row is a user, its newest item the one to be found."""
    for part, left_out in PARTS.items():
        (out / part).mkdir(parents=True)
        lists = [row[: len(row) - left_out] for row in rows]
        for file in range(FILES):
            own = lists[file::FILES]
            table = pa.table({"history": pa.array(own, pa.list_(pa.int64())), "label": pa.array([1] * len(own))})
            pq.write_table(table, out / part / f"{file}.parquet", row_group_size=1024)
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
