#!/usr/bin/env python
"""Converts Criteo's click logs to Parquet: `python data/criteo/prepare.py train.txt` or `… day_*.gz --ray`.

The logs have to be fetched by hand, under Criteo's terms; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rayrec.data.errors import DataError
from rayrec.data.tools.criteo import convert
from rayrec.data.tools.on_ray import each
from rayrec.data.tools.parquet_parts import Layout


def main(argv: list[str] | None = None) -> int:
    """Converts, then sets the last part in time aside for evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="train.txt, or day_0 … day_23, with or without .gz")
    parser.add_argument("--out", type=Path, default=Path("data/criteo/parquet"))
    parser.add_argument("--eval-share", type=float, default=1 / 7, help="share of the files, the last ones")
    parser.add_argument("--rows-per-file", type=int, default=4 << 20)
    parser.add_argument("--ray", action="store_true", help="convert the inputs side by side, one Ray task each")
    args = parser.parse_args(argv)
    layout = Layout(rows_per_file=args.rows_per_file)
    try:
        files: list[Path] = []
        work = partial(convert, folder=(args.out / "train").absolute(), layout=layout)
        sources = [source.absolute() for source in args.sources]
        for source, some in zip(sources, each(work, sources, on_ray=args.ray), strict=True):
            print(f"{source}: {len(some)} files", flush=True)
            files += some
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    held_out = round(len(files) * args.eval_share)
    if not 0 < held_out < len(files):
        print(f"error: {len(files)} files cannot be split; lower --rows-per-file", file=sys.stderr)
        return 1
    (args.out / "eval").mkdir(exist_ok=True)
    for file in files[-held_out:]:
        file.rename(args.out / "eval" / file.name)
    print(f"{len(files) - held_out} files to train on, {held_out} for evaluation, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
