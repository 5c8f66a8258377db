"""Train: `ray job submit --working-dir . -- python jobs/train.py --config data/movielens/train.yaml`.

Takes the options of `rayrec train`. Relative paths are looked up in the job's copy of the working folder, which leaves
out files that git ignores: give data and storage as paths that every node sees, or `--root FOLDER` for all of them.
"""

from __future__ import annotations

import argparse
import sys

from rayrec.cli import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", required=True, help="YAML file with the config")
    known, options = parser.parse_known_args()
    sys.exit(run(["train", known.config, *options]))
