"""A process-wide flag without effect, for programs that read it back: vectors are always on the model's device."""

from __future__ import annotations

_propagate_device = False


def set_propogate_device(val: bool) -> None:
    """Sets the flag."""
    global _propagate_device
    _propagate_device = val


def get_propogate_device() -> bool:
    """Returns the flag; False by default."""
    return _propagate_device
