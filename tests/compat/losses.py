"""Runs every script on a package, on one gloo rank: `python -m tests.compat.losses rayrec` prints the losses as JSON.

`python -m tests.compat.losses torchrec > tests/compat/recorded/losses.json` records TorchRec's,
and the checkpoint that its script wrote.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent / "scripts"
STEPS = 20


def script(path: Path, package: str) -> dict[str, Any]:
    """What a script defines, in which only the package's name is changed."""
    space: dict[str, Any] = {"__name__": f"{package}_script"}
    exec(compile(path.read_text(encoding="utf-8").replace("rayrec", package), str(path), "exec"), space)
    return space


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        scripts = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "given"))
        answers = {path.stem: script(path, sys.argv[1])["train"](STEPS) for path in scripts}
        if sys.argv[1] == "torchrec":
            script(FOLDER / "checkpoint.py", "torchrec")["train"](STEPS, str(FOLDER.parent / "recorded" / "checkpoint"))
        dist.destroy_process_group()
    print(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
