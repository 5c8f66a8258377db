"""Checkpoints that belong to no plan and no world size, in a storage format of our own; nothing in them is ever run.

| file | holds |
|---|---|
| `store` | what users call: save, find, load, prune |
| `contents`, `table_state` | what of a model is saved, and its loading |
| `rectangles` | tensors in pieces, for torch.distributed.checkpoint's planners: what of the saved is needed |
| `saving`, `background`, `polling`, `memory` | a save in a thread, beside training, without slow collectives |
| `writer`, `reader`, `container`, `index` | the files: safetensors, a JSON index with checksums |
| `manifest` | what makes a folder a complete checkpoint |
| `tools`, `warm_start` | what the command does; tables and layers for another model |
| `launch`, `attempt` | which start of a run holds the folder, and which of its worker groups owns it |
| `retention` | which checkpoints stay, which is best |
| `mapping`, `errors` | what ids mean, what can be wrong |

The names here are loaded when first used: a folder can be listed without torch.
"""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.checkpoint.background import Outcome
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
    from rayrec.checkpoint.store import CheckpointStore, Saving

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
    "TakenOverError",
    "newer_damaged",
    "no_whole",
]
