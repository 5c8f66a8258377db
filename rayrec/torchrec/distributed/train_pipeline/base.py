"""`TrainPipelineBase`, which only copies the next batch in advance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rayrec.torchrec.distributed.train_pipeline.progress import Forward, In, Out, TrainPipeline


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Trains one batch at a time and copies the next one in advance. After the end of an iterator, call `reset` before
    you use another.

    Args:
        model: takes a batch; returns (losses, output).
        optimizer: optimizer of the parameters that are not updated in the backward pass.
        device: device of the batches.
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
