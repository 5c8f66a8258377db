"""Checkpoints that belong to no plan and no world size, on torch.distributed.checkpoint."""

from rayrec.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
