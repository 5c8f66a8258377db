"""`TrainPipelineBase`: copies the next batch ahead, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rayrec.torchrec.distributed.train_pipeline.progress import Forward, In, Out, TrainPipeline


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Trains batch after batch, and copies the next one ahead. At the end of an iterator, call `reset` to use another.

    Args:
        model: takes a batch; returns (losses, output).
        optimizer: of what is not trained inside backward.
        device: where batches are moved.
        custom_model_fwd: called with the batch instead of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd, send_ahead=False)
        self._ended = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return super().progress(dataloader_iter)
        except StopIteration:
            self._ended = True
            raise

    def reset(self) -> None:
        super().reset()
        self._ended = False
