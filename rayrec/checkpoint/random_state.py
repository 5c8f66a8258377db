"""The state of random numbers, so that dropout after a resume draws what it would have drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RNG = "rng"


def random_states(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's generators, torch's, Python's and numpy's, as bytes by key."""
    states = {"torch": torch.get_rng_state(), "python": _bytes(random.getstate()), "numpy": _bytes(_numpy_state())}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RNG}/{rank:05d}/{name}": state for name, state in states.items()}


def room_for(rank: int, sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Empty tensors for what a checkpoint has of a rank's states.

    Args:
        sizes: `size` of each of the checkpoint's tensors, by key.
    """
    own = f"{RNG}/{rank:05d}/"
    return {key: torch.empty(saved.size, dtype=torch.uint8) for key, saved in sizes.items() if key.startswith(own)}


def set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_states` gave."""
    by_name = {key.rpartition("/")[2]: state for key, state in states.items()}
    if "torch" in by_name:
        torch.set_rng_state(by_name["torch"])
    if "cuda" in by_name and device.type == "cuda":
        torch.cuda.set_rng_state(by_name["cuda"], device)
    if "python" in by_name:
        version, numbers, gauss = _value(by_name["python"])
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in by_name:
        name, keys, *rest = _value(by_name["numpy"])
        np.random.set_state((name, np.array(keys, np.uint32), *rest))


def _numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), *rest]


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.numpy()))
