"""Plan: `python jobs/plan.py --config data/movielens/train.yaml --world 16x8 --gpu h100`; needs no cluster.

Shows how tables would be sharded; takes the options of `rayrec plan`.
"""

from __future__ import annotations

import argparse
import sys

from rayrec.cli import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", required=True, help="YAML file with the config")
    known, options = parser.parse_known_args()
    sys.exit(run(["plan", known.config, *options]))
