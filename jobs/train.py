"""Train: `ray job submit --working-dir . -- python jobs/train.py --config data/movielens/train.yaml`.

Takes the options of `rayrec train`. Relative paths are looked up in the job's copy of the working folder, which comes
without what git ignores. Data that is missing there is prepared anew where a `prepare.py` lies beside the config, which
serves a cluster of one node. On several nodes, give data and storage as paths that all of them see, or `--root FOLDER`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rayrec.cli import run


def prepare_missing(config: Path, options: list[str]) -> None:
    """Runs the data set's own script where its relative data folder did not come along."""
    script = config.parent / "prepare.py"
    elsewhere = any(option.startswith(("--root", "data.")) for option in options)
    if script.is_file() and not (config.parent / "parquet").exists() and not elsewhere:
        subprocess.run([sys.executable, str(script)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", required=True, help="YAML file with the config")
    known, options = parser.parse_known_args()
    prepare_missing(Path(known.config), options)
    sys.exit(run(["train", known.config, *options]))
