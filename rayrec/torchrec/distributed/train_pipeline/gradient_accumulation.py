"""Gradient accumulation over several batches per optimizer step, for any pipeline with `progress`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import nn

from rayrec.torchrec.distributed.train_pipeline.progress import In, Out


@dataclass
class GradientAccumulationConfig:
    """Settings of gradient accumulation.

    Args:
        is_enabled: implied by `num_steps` above 1.
        num_steps: batches per optimizer step.
        num_warmup_steps: initial batches after which ranks exchange gradients every time.

    Raises:
        ValueError: a number below 1.
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self.is_enabled = self.is_enabled or self.num_steps > 1


class _Accumulating:
    """An optimizer that performs every `num_steps`-th step, and clears gradients only after these."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._optimizer, self._num_steps = optimizer, num_steps
        self.current_step = 0
        self._clear = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._clear:
            self._optimizer.zero_grad(set_to_none=set_to_none)
            self._clear = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        if (self.current_step + 1) % self._num_steps == 0:
            self._optimizer.step(*args, **kwargs)
            self._clear = True

    def finish(self) -> None:
        """Performs the step for the remaining batches, fewer than `num_steps`."""
        if self.current_step % self._num_steps:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        self.current_step, self._clear = 0, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class GradientAccumulationWrapper(Generic[In, Out]):
    """A pipeline that steps its optimizer once per `config.num_steps` batches. Tables with an optimizer in the backward
    pass are updated by every batch.

    Args:
        pipeline: any pipeline with `progress`.
        optimizer: the optimizer of the pipeline.
        model: the model of the pipeline; ranks exchange its gradients only for the last batch of a step.
        config: the settings.
    """

    def __init__(
        self, pipeline: Any, optimizer: torch.optim.Optimizer, model: nn.Module, config: GradientAccumulationConfig
    ) -> None:
        self._pipeline, self._model, self._config = pipeline, model, config
        self.optimizer_wrapper = _Accumulating(optimizer, config.num_steps)
        if config.is_enabled:
            pipeline._optimizer = self.optimizer_wrapper

    def progress(self, dataloader_iter: Iterator[Any], is_last_batch: bool | None = None) -> Any:
        """Calls `progress` of the pipeline.

        Args:
            is_last_batch: step the optimizer after this batch in any case.

        Raises:
            StopIteration: no batch is left; the optimizer has stepped with the accumulated gradients.
        """
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        with ExitStack() as stack:
            if not (is_last_batch or self._exchanges()):
                for module in self._model.modules():
                    if isinstance(module, nn.parallel.DistributedDataParallel):
                        stack.enter_context(module.no_sync())
            try:
                output = self._pipeline.progress(dataloader_iter)
            except StopIteration:
                self.optimizer_wrapper.finish()
                raise
        self.optimizer_wrapper.current_step += 1
        if is_last_batch:
            self.optimizer_wrapper.finish()
        return output

    def _exchanges(self) -> bool:
        step = self.current_step
        return step < self._config.num_warmup_steps or (step + 1) % self._config.num_steps == 0

    @property
    def current_step(self) -> int:
        """Number of batches so far."""
        return self.optimizer_wrapper.current_step

    def set_step(self, step: int) -> None:
        """Sets the number of batches so far."""
        self.optimizer_wrapper.current_step = step

    def reset(self) -> None:
        """Resets the number of batches, and the pipeline."""
        self.optimizer_wrapper.reset()
        self._pipeline.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)
