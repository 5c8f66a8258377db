#!/usr/bin/env python
"""Converts Criteo's click logs to Parquet: `python data/criteo/prepare.py train.txt` or `… day_*.gz --ray`.

The logs have to be fetched by hand, under Criteo's terms; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rayrec.data.criteo import Layout, convert
from rayrec.data.errors import DataError


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
        for source, some in _converted(args.sources, args.out / "train", layout, args.ray):
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


def _converted(sources: list[Path], folder: Path, layout: Layout, on_ray: bool) -> Iterator[tuple[Path, list[Path]]]:
    """(input, its files), in the order of the inputs."""
    if not on_ray:
        for source in sources:
            yield source, convert(source, folder, layout)
        return
    import ray

    ray.init(ignore_reinit_error=True, logging_level="ERROR")
    task = ray.remote(convert)
    refs = [task.remote(source.absolute(), folder.absolute(), layout) for source in sources]
    for source, ref in zip(sources, refs, strict=True):
        try:
            yield source, ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, DataError) else error from None


if __name__ == "__main__":
    sys.exit(main())
