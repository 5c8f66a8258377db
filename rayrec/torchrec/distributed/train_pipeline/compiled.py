"""`TrainPipelinePT2`: a pipeline that compiles its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.torchrec.distributed.train_pipeline.base import TrainPipelineBase
from rayrec.torchrec.distributed.train_pipeline.progress import In, Out


@dataclass(frozen=True)
class TorchCompileConfig:
    """Settings of `TrainPipelinePT2`.

    Args:
        fullgraph, dynamic, backend: see torch.compile.
        compile_on_iter: the first compiled step.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int | None = 3


class TrainPipelinePT2(TrainPipelineBase[In, Out]):
    """`TrainPipelineBase` that compiles its model with torch.compile after some steps.

    Args:
        compile_configs: default: `TorchCompileConfig()`.
        pre_compile_fn, post_compile_fn: called with the model before and after compilation.
        input_transformer: maps the batch to the input of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._configs = compile_configs or TorchCompileConfig()
        self._pre_compile, self._post_compile, self._transform = pre_compile_fn, post_compile_fn, input_transformer
        self._step = 0
        self._forward = self._transformed

    def _transformed(self, batch: Any) -> tuple[torch.Tensor, Any]:
        settings = self._configs
        if self._step == settings.compile_on_iter:
            if self._pre_compile is not None:
                self._pre_compile(self._model)
            self._model.compile(fullgraph=settings.fullgraph, dynamic=settings.dynamic, backend=settings.backend)
            if self._post_compile is not None:
                self._post_compile(self._model)
        self._step += 1
        return self._model(batch if self._transform is None else self._transform(batch))
