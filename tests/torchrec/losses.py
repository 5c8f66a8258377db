"""Runs every script on a package, on one gloo rank, or on as many as it names (`RANKS`):
`python -m tests.torchrec.losses rayrec.torchrec` prints the losses of every rank as JSON.

`python -m tests.torchrec.losses torchrec > tests/torchrec/recorded/losses.json` records TorchRec's,
and the checkpoint that its script wrote. TorchRec 1.8's metrics need torchmetrics 1.0.3.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.torchrec.processes import on_processes

FOLDER = Path(__file__).parent / "scripts"
RECORDED = Path(__file__).parent / "recorded"
STEPS = 20


def script(path: Path, package: str) -> dict[str, Any]:
    """What a script defines when its imports name `package` instead of `torchrec`."""
    space: dict[str, Any] = {"__name__": f"{package}_script"}
    text = path.read_text(encoding="utf-8").replace("\nfrom torchrec", f"\nfrom {package}")
    exec(compile(text, str(path), "exec"), space)
    return space


def names(world: int) -> list[str]:
    """The scripts that run on so many ranks."""
    listed = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    ranks = {name: 2 if "\nRANKS = 2\n" in text else 1 for name, text in listed.items()}
    return [name for name in listed if name not in ("__init__", "given") and ranks[name] == world]


def losses(package: str, world: int) -> dict[str, list[float]]:
    """Of each script, on a rank of `world`."""
    found = {name: script(FOLDER / f"{name}.py", package)["train"](STEPS) for name in names(world)}
    if (package, world) == ("torchrec", 1):
        script(FOLDER / "checkpoint.py", package)["train"](STEPS, str(RECORDED / "checkpoint"))
    return found


def main(package: str) -> None:
    importlib.import_module(package)
    answers: dict[str, list[list[float]]] = {}
    for world in (1, 2):
        by_rank = on_processes(world, losses, package, world)
        answers |= {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(of_ranks)}" for name, of_ranks in answers.items())
    print("{\n" + lines + "\n}")


if __name__ == "__main__":
    main(sys.argv[1])
