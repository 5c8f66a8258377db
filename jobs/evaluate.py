"""Evaluate: `ray job submit --working-dir . -- python jobs/evaluate.py --run FOLDER [--data PATH] [--workers N]`.

Scores a checkpoint of a run, by default the newest; takes the options of `rayrec evaluate`.
"""

from __future__ import annotations

import argparse
import sys

from rayrec.cli import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run", required=True, help="run folder")
    known, options = parser.parse_known_args()
    sys.exit(run(["evaluate", known.run, *options]))
