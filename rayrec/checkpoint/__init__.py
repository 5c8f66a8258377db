"""Checkpoints that are independent of plan and world size. README.md describes the data flow and the files.

Names are imported on first use, so that code can list a folder without importing torch.
"""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.checkpoint.errors import (
        CheckpointError,
        DamagedCheckpointError,
        FencedError,
        NoWholeCheckpointError,
        RemovedCheckpointError,
        TakenOverError,
        no_whole,
    )
    from rayrec.checkpoint.manifest import Checkpoint, newer_damaged
    from rayrec.checkpoint.retention import Best
    from rayrec.checkpoint.saving import Outcome
    from rayrec.checkpoint.store import CheckpointStore, Saving, Started

__getattr__ = lazy_names(__name__)

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DamagedCheckpointError",
    "FencedError",
    "NoWholeCheckpointError",
    "Outcome",
    "RemovedCheckpointError",
    "Saving",
    "Started",
    "TakenOverError",
    "newer_damaged",
    "no_whole",
]
