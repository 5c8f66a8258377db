#!/usr/bin/env python
"""Writes a synthetic click log as Parquet: `python data/synthetic/generate.py --rows 1000000`; see README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rayrec.storage.parallel import one_by_one

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clicks import SyntheticSpec, best_auc, write_file


def main(argv: list[str] | None = None) -> int:
    """Writes the files, the last ones for evaluation, or prints the schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, field in SyntheticSpec.model_fields.items():
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=field.default, help=" ")
    parser.add_argument("--eval-files", type=int, default=1, help="number of evaluation files")
    parser.add_argument("--out", type=Path, default=Path("data/synthetic/parquet"), help="output folder")
    parser.add_argument("--schema", action="store_true", help="print schema and table sizes as YAML, write nothing")
    parser.add_argument("--ray", action="store_true", help="write the files in parallel, one Ray task each")
    args = parser.parse_args(argv)
    try:
        spec = SyntheticSpec(**{name: getattr(args, name) for name in SyntheticSpec.model_fields})
    except ValidationError as error:
        parser.error("; ".join(f"--{e['loc'][0]}: {e['msg']}" for e in error.errors()))
    if not 0 <= args.eval_files < spec.files:
        parser.error(f"--eval-files must be at least 0 and less than --files {spec.files}")
    if args.schema:
        _print_schema(spec)
        return 0
    train = spec.files - args.eval_files
    folders = {n: (args.out / ("train" if n < train else "eval")).absolute() for n in range(spec.files)}
    for _ in one_by_one(partial(_write, spec, folders), range(spec.files), on_ray=args.ray):
        pass
    print(f"{spec.rows:,} rows in {train} training files and {args.eval_files} evaluation files in {args.out}")
    best = [auc for n in range(train, spec.files) if (auc := best_auc(spec, n)) is not None]
    if best:
        print(f"AUC of the planted signal on the evaluation files: {sum(best) / len(best):.4f}")
    return 0


def _write(spec: SyntheticSpec, folders: dict[int, Path], number: int) -> Path:
    return write_file(spec, folders[number], number)


def _print_schema(spec: SyntheticSpec) -> None:
    import yaml

    tables = [{"name": name, "rows": rows, "dim": 16, "features": [name]} for name, rows in spec.ids.items()]
    print(yaml.safe_dump({"schema": spec.schema_dict(), "tables": tables}, sort_keys=False, default_flow_style=None))


if __name__ == "__main__":
    sys.exit(main())
