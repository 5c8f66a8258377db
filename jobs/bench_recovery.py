"""How fast a run is back after a fault, and what its checkpoints cost.

    python jobs/bench_recovery.py --json
    python jobs/bench_recovery.py --only storage --gb 2

Each measurement gives some fields of the object in the last line; `MEASUREMENTS` lists them. Goals are told beside the
figures; the exit status does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_recovery_runs
import bench_recovery_storage

# Name → what it measures; takes the options, returns fields.
MEASUREMENTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "runs": bench_recovery_runs.measure,
    "storage": bench_recovery_storage.measure,
}

# Field → (goal as told, whether a figure meets it).
GOALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "start_s": ("≤ 12", lambda seconds: seconds <= 12),
    "kill_s": ("≤ 20", lambda seconds: seconds <= 20),
    "shrink_s": ("≤ 30", lambda seconds: seconds <= 30),
    "grow_s": ("≤ 30", lambda seconds: seconds <= 30),
    "save_ratio_to_disk": ("≥ 0.7", lambda ratio: ratio >= 0.7),
    "load_ratio_to_disk": ("≥ 0.7", lambda ratio: ratio >= 0.7),
    "step_ratio_during_save": ("≤ 1.1", lambda ratio: ratio <= 1.1),
    "save_peak_over_state_bytes": ("≤ 256 MB", lambda nbytes: nbytes <= 256 << 20),
}


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="+", choices=sorted(MEASUREMENTS), help="some measurements instead of all")
    cli.add_argument("--gb", type=float, default=2.0, help="size of the state that is saved, over both ranks")
    cli.add_argument("--rounds", type=int, default=3, help="how often each side of a ratio is measured")
    cli.add_argument("--folder", help="where files are written; default: a temporary folder")
    cli.add_argument("--json", action="store_true", help="one object with all fields as the last line")
    args = cli.parse_args()
    fields: dict[str, float] = {}
    for name in args.only or MEASUREMENTS:
        fields |= MEASUREMENTS[name](args)
    print(f"\n{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores")
    for name, value in fields.items():
        goal, meets = GOALS.get(name, ("", lambda _: True))
        told = f"goal {goal}{'' if meets(value) else ', missed'}" if goal else ""
        print(f"{name:32s} {value:>16,.3f}  {told}")
    if args.json:
        print(json.dumps(fields))
    return 0


if __name__ == "__main__":
    sys.exit(main())
