"""Converts a file of item sequences to Parquet for next-item models, leave one out.

    python data/beauty/prepare.py Beauty.txt [--out data/beauty/parquet]

Each line of the file has a user and then items in order of time. The last item of a user is for the test, the second
last for validation; `train` has neither.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Items left out at the end of each sequence.
SPLITS = {"train": 2, "validation": 1, "test": 0}
MANIFEST = "manifest.json"
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


def remove_earlier(out: Path) -> None:
    """Removes the files of an earlier run of this script.

    Raises:
        SystemExit: `out` contains other files.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise SystemExit(f"{out} is not a folder; choose another one with --out")
    written = {out / split / f"{file}.parquet" for split in SPLITS for file in range(FILES)} | {out / MANIFEST}
    contents = {path for path in out.rglob("*") if not path.is_dir()}
    foreign = contents - written if _is_manifest(out / MANIFEST) else contents
    if foreign:
        raise SystemExit(
            f"{out} contains files that this script did not write ({min(foreign).relative_to(out)}, …); remove them or "
            "choose another folder with --out"
        )
    for path in contents:
        path.unlink()


def _is_manifest(path: Path) -> bool:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"users", "rows of the item table", "interactions"} == manifest.keys()


def write(rows: list[list[int]], out: Path) -> None:
    """Writes `train`, `validation` and `test`: a row per user; the newest item is the target."""
    out.mkdir(parents=True, exist_ok=True)
    items = 1 + max(max(row) for row in rows)
    settings = {"users": len(rows), "rows of the item table": items, "interactions": sum(map(len, rows))}
    # First, so that the next run recognizes the files of an interrupted one.
    (out / MANIFEST).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    for split, left_out in SPLITS.items():
        (out / split).mkdir(exist_ok=True)
        lists = [row[: len(row) - left_out] for row in rows]
        for file in range(FILES):
            file_lists = lists[file::FILES]
            table = pa.table(
                {"history": pa.array(file_lists, pa.list_(pa.int64())), "label": pa.array([1] * len(file_lists))}
            )
            pq.write_table(table, out / split / f"{file}.parquet", row_group_size=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data/beauty/parquet"))
    args = parser.parse_args()
    rows = read(args.file)
    remove_earlier(args.out)
    write(rows, args.out)
    print((args.out / MANIFEST).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
