"""Cases of the pipelines that are driven by `progress`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.compat.case import Cases
from tests.compat.cases_modules import fill
from tests.compat.package import Package, attempt

CASES = case = Cases()


class Task(nn.Module):
    """(loss, output) of a tensor batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(batch)
        return out.square().mean(dim=0), out.detach()


def batches(count: int) -> list[torch.Tensor]:
    return [torch.sin(torch.arange(6.0) + step).view(2, 3) for step in range(count)]


def driven(rec: Package, kind: str, train: bool = True) -> Any:
    model = fill(Task()).train(train)
    make = getattr(rec("distributed.train_pipeline"), kind)
    pipeline = make(model, torch.optim.SGD(model.parameters(), lr=0.5), torch.device("cpu"))
    source, outputs = iter(batches(3)), []
    while True:
        try:
            outputs.append(pipeline.progress(source))
        except StopIteration:
            break
    again = attempt(lambda: pipeline.progress(source))
    return [outputs, again, model.layer.weight]


@case("8/the progress")
def progress(rec: Package) -> Any:
    return [driven(rec, "TrainPipelineBase"), driven(rec, "TrainPipelineBase", train=False)]


@case("8/TrainPipelineBase")
def base(rec: Package) -> Any:
    model = fill(Task())
    make = rec("distributed").TrainPipelineBase
    pipeline = make(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), None, False)
    return [pipeline.progress(iter(batches(1))), model.layer.weight]


@case("8/EvalPipelineSparseDist")
def evaluation(rec: Package) -> Any:
    return hasattr(rec("distributed.train_pipeline").EvalPipelineSparseDist, "progress")


@case("8/PrefetchTrainPipelineSparseDist")
def prefetching(rec: Package) -> Any:
    return hasattr(rec("distributed.train_pipeline").PrefetchTrainPipelineSparseDist, "progress")
