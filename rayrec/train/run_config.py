"""The config that a run folder holds, for those who read a run: it may name no code that would be imported unasked.

A run folder lies in shared storage, where others may write. What `rayrec train` is given is the user's own word; what a
folder says is not.
"""

from __future__ import annotations

from typing import Any

from rayrec.train.errors import TrainError
from rayrec.train.run_folder import RunFolder


def config_of_run(folder: RunFolder, *, allow_code: bool) -> dict[str, Any]:
    """The plain values of a run's `config.yaml`.

    Args:
        allow_code: whether `model.factory` there may be imported; also right where the caller gives a factory instead.

    Raises:
        TrainError: it is no run folder, or names code and may not.
    """
    raw = folder.read_config()
    if raw is None:
        raise TrainError(f"{folder.path} is not a run folder: it has no config.yaml")
    model = raw.get("model")
    named = model.get("factory") if isinstance(model, dict) else None
    if named is not None and not allow_code:
        raise TrainError(
            f"{folder.config} names code of its own, model.factory={named}, which would be imported and run here; "
            f"if you trust who wrote that folder, give --allow-code (from Python: allow_code=True, or factory=…)"
        )
    return raw
