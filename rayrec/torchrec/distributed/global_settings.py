"""A process-wide flag, kept for programs that read it back: vectors are on the model's device in any case."""

from __future__ import annotations

_propagate_device = False


def set_propogate_device(val: bool) -> None:
    """Sets the flag."""
    global _propagate_device
    _propagate_device = val


def get_propogate_device() -> bool:
    """The flag; False at first."""
    return _propagate_device
