"""Runs every program of this folder in one process and prints their losses as JSON.

`python -m rayrec.torchrec tests/torchrec/programs/every.py` runs them on rayrec. With TorchRec 1.8 installed,
`python tests/torchrec/programs/every.py > tests/torchrec/recorded/programs.json` records TorchRec's losses.
"""

from __future__ import annotations

import gc
import json
import runpy
from pathlib import Path

import torch


def main() -> None:
    torch.set_num_threads(1)
    paths = sorted(Path(__file__).parent.glob("*.py"))
    names = [path.stem for path in paths if path.stem not in ("__init__", "every")]
    found = {name: _losses(name) for name in names}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(losses)}" for name, losses in found.items())
    print("{\n" + lines + "\n}")


def _losses(name: str) -> list[float]:
    losses: list[float] = runpy.run_path(str(Path(__file__).parent / f"{name}.py"))["main"]()
    gc.collect()  # a process group left to the collector would be ended in a child that is forked next, and hang there
    return losses


if __name__ == "__main__":
    main()
