"""State that goes from TorchRec to rayrec and back, of a model whose tables lie on two ranks, with its optimizers.

`python -m tests.torchrec.states record` (TorchRec importable) writes TorchRec's checkpoint of two ranks and a plain
`state_dict`, what they hold, and the losses that follow; `python -m tests.torchrec.states back` (rayrec and TorchRec)
has rayrec write one, and TorchRec go on from it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.torchrec.losses import FOLDER, RECORDED, STEPS, script
from tests.torchrec.processes import on_processes

SHARDED = RECORDED / "checkpoint_2_ranks"
PLAIN = RECORDED / "plain.pt"


def train_and_save(package: str, folder: str) -> dict[str, Any]:
    """Half of the steps and a checkpoint, on one of two ranks: what it holds, and the losses of the other half."""
    return script(FOLDER / "checkpoint.py", package)["train_sharded"](STEPS, folder)


def go_on(package: str, folder: str) -> list[float]:
    """The losses of the other half, on one of two ranks, from a checkpoint."""
    space = script(FOLDER / "checkpoint.py", package)
    return space["resume"](folder, STEPS, space["SHARDED"](), space["ELEMENTWISE"])


def described(state: Any) -> Any:
    """Keys, kinds, types, shapes and where shards lie, as what JSON can hold."""
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    if isinstance(state, list):
        return [described(value) for value in state]
    if type(state).__name__ == "ShardedTensor":
        facts = state.metadata()
        shards = [[list(s.shard_offsets), list(s.shard_sizes), str(s.placement)] for s in facts.shards_metadata]
        return {"sharded": sorted(shards), "size": list(facts.size), "dtype": str(facts.tensor_properties.dtype)}
    if isinstance(state, torch.Tensor):
        return {"tensor": list(state.shape), "dtype": str(state.dtype)}
    return state if isinstance(state, bool | int | float | str | None) else type(state).__name__


def joined(states: list[Any]) -> Any:
    """What any rank says: TorchRec's optimizer names a table only on ranks that hold a part of it."""
    if not isinstance(states[0], dict):
        return states[0]
    keys = sorted({key for state in states for key in state})
    return {key: joined([state[key] for state in states if key in state]) for key in keys}


def plain_state(package: str) -> dict[str, torch.Tensor]:
    """Of a model that is not sharded, trained for some steps."""
    return script(FOLDER / "checkpoint.py", package)["train_plain"](STEPS)


def record() -> None:
    importlib.import_module("torchrec")
    answers = on_processes(2, train_and_save, "torchrec", str(SHARDED))
    state, losses = joined([answer["state"] for answer in answers]), [answer["losses"] for answer in answers]
    text = json.dumps({"state": state, "losses": losses})
    (RECORDED / "states.json").write_text(text + "\n", encoding="utf-8")
    torch.save(plain_state("torchrec"), PLAIN)


def back() -> int:
    """TorchRec goes on from what rayrec wrote, as rayrec does."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-W", "ignore", "-m", "tests.torchrec.states"]
        wrote = subprocess.run([*run, "write", folder], capture_output=True, text=True, check=True)
        read = subprocess.run([*run, "read", folder], capture_output=True, text=True, check=True)
    ours, theirs = json.loads(wrote.stdout), json.loads(read.stdout)
    worst = max(abs(a - b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    print(f"TorchRec goes on from rayrec's checkpoint: losses differ by at most {worst:.1e}")
    return int(worst > 1e-5)


def main(what: str, folder: str = "") -> int:
    if what == "record":
        record()
    elif what == "back":
        return back()
    elif what == "write":
        importlib.import_module("rayrec.torchrec")
        print(json.dumps([answer["losses"] for answer in on_processes(2, train_and_save, "rayrec.torchrec", folder)]))
    elif what == "read":
        importlib.import_module("torchrec")
        print(json.dumps(on_processes(2, go_on, "torchrec", str(Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
