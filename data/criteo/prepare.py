#!/usr/bin/env python
"""Converts Criteo's click logs to Parquet: `python data/criteo/prepare.py train.txt` or `… day_*.gz --ray`.

The logs have to be fetched by hand, under Criteo's terms; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from rayrec.data.errors import DataError
from rayrec.data.tools.criteo import convert
from rayrec.data.tools.hold_out import hold_out
from rayrec.data.tools.on_ray import each
from rayrec.data.tools.parquet_parts import Layout


def main(argv: list[str] | None = None) -> int:
    """Converts, then sets the last part in time aside for evaluation; what fails leaves nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="train.txt, or day_0 … day_23, with or without .gz")
    parser.add_argument("--out", type=Path, default=Path("data/criteo/parquet"))
    parser.add_argument("--eval-share", type=float, default=1 / 7, help="share of the rows, the last ones")
    parser.add_argument("--rows-per-file", type=int, default=4 << 20)
    parser.add_argument("--ray", action="store_true", help="convert the inputs side by side, one Ray task each")
    args = parser.parse_args(argv)
    if not 0 < args.eval_share < 1:
        parser.error(f"--eval-share {args.eval_share} must lie between 0 and 1")
    incoming, there = args.out.absolute() / "_incoming", args.out.exists()
    try:
        trained, held = _prepare(args, incoming)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        if not there and args.out.exists() and not any(args.out.iterdir()):
            args.out.rmdir()
    print(f"{trained:,} rows to train on, {held:,} for evaluation, in {args.out}")
    return 0


def _prepare(args: argparse.Namespace, incoming: Path) -> tuple[int, int]:
    """Rows to train on and rows for evaluation."""
    train, held = (args.out.absolute() / part for part in ("train", "eval"))
    for folder in (train, held):
        if any(folder.glob("*.parquet")):
            raise DataError("the folder holds data already", file=str(folder), fix="remove it, or name another --out")
    layout = Layout(rows_per_file=args.rows_per_file)
    files: list[Path] = []
    work = partial(convert, folder=incoming, layout=layout)
    sources = [source.absolute() for source in args.sources]
    for source, some in zip(sources, each(work, sources, on_ray=args.ray), strict=True):
        print(f"{source}: {len(some)} files", flush=True)
        files += some
    if len(set(files)) < len(files):
        raise DataError("two inputs have one name", file=str(sources[0]), fix="rename one of them")
    return hold_out(files, args.eval_share, train, held, layout)


if __name__ == "__main__":
    sys.exit(main())
