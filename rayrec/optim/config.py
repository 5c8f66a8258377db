"""The section `optimizers` of a train config: dense and sparse optimizers, schedules, freezing."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec._runtime.strict import Section


class ScheduleConfig(Section):
    """The learning rate over the steps: `lr` times a factor, which warms up, stays at 1, and decays."""

    kind: Literal["constant", "linear", "step", "cosine", "polynomial"] = "constant"
    """how it decays: not at all; on a line; by `gamma` every `decay_steps`; on half a cosine; as `(1 - t)^power`, which
    with `power: 2` is MLPerf's DLRM"""
    warmup_steps: int = Field(default=0, ge=0, description="steps from `warmup_from` up to 1, on a line")
    warmup_from: float = Field(default=0.0, ge=0, le=1, description="factor that the warm-up starts from")
    decay_from: int = Field(default=0, ge=0, description="step that the decay starts at, at the earliest after warm-up")
    decay_steps: int | None = Field(default=None, ge=1)
    """steps of the decay, or between two of `step`; needed where there is a decay"""
    end: float = Field(default=0.0, ge=0, le=1, description="factor after the decay (not read by `step`)")
    power: float = Field(default=2.0, gt=0, description="of `polynomial`")
    gamma: float = Field(default=0.1, gt=0, le=1, description="of `step`")

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> ScheduleConfig:
        if self.kind != "constant" and self.decay_steps is None:
            raise ValueError(f"kind {self.kind!r} needs `decay_steps`")
        return self

    def factor(self, step: int) -> float:
        """Multiplier of the learning rate at a step, counted from 0.

        It is 1 at the last warm-up step, and `end` from the first step after the decay.
        """
        if step < self.warmup_steps:
            done = (step + 1) / self.warmup_steps
            return self.warmup_from + (1 - self.warmup_from) * done
        since = step - max(self.decay_from, self.warmup_steps)
        if self.kind == "constant" or self.decay_steps is None or since < 0:
            return 1.0
        if self.kind == "step":
            return float(self.gamma ** (since // self.decay_steps))
        left = 1 - min(1.0, since / self.decay_steps)
        shape = {
            "linear": left,
            "cosine": (1 - math.cos(math.pi * left)) / 2,
            "polynomial": left**self.power,
        }[self.kind]
        return float(self.end + (1 - self.end) * shape)


class DenseOptimizerConfig(Section):
    """Trains everything that is not an embedding table, and tables whose kernel is `dense`."""

    kind: Literal["sgd", "adam", "adamw", "adagrad"] = Field(default="adam", description="the optimizer")
    lr: float = Field(default=0.001, gt=0, description="learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = None
    """gradients of all its parameters together are scaled down to this norm"""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay of a running average of the dense weights (tables apart), e.g. 0.999: evaluations, exports and predictions
    use the average; `null`: the weights themselves"""
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="the learning rate over the steps")


SparseKind = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd"
]


class SparseOptimizerConfig(Section):
    """Trains the embedding tables, inside the backward pass; only rows that a batch has ids of change."""

    kind: SparseKind = Field(default="rowwise_adagrad", description="the optimizer")
    lr: float = Field(default=0.05, gt=0, description="learning rate")
    eps: float = Field(default=1e-8, gt=0)
    """added to the root of the squared gradients (not read by sgd and lars_sgd)"""
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient, of adam and lamb")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient, of adam and lamb")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of lars_sgd")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of the rows that a batch touches")
    stochastic_rounding: bool = False
    """round 16-bit tables up or down at random, so that small updates are not lost"""
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="the learning rate over the steps")


class TableOptimizerConfig(Section):
    """What one table's optimizer has other than `optimizers.sparse`; `null` is as there."""

    kind: SparseKind | None = Field(default=None, description="the optimizer")
    lr: Annotated[float, Field(gt=0)] | None = None
    """learning rate, times the schedule of `optimizers.sparse`"""
    eps: Annotated[float, Field(gt=0)] | None = Field(default=None, description="as in `optimizers.sparse`")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(default=None, description="as in `optimizers.sparse`")


class FreezeConfig(Section):
    """Parameters that stand still."""

    names: str = Field(min_length=1)
    """tables, or dense parameters, by name; `*` stands for anything, e.g. `over_arch.*`"""
    until: Annotated[int, Field(ge=1)] | None = None
    """steps after which they are trained; `null`: never"""


class OptimizersConfig(Section):
    """How parameters change."""

    dense: DenseOptimizerConfig = Field(default=DenseOptimizerConfig(), description="optimizer of the dense parameters")
    sparse: SparseOptimizerConfig = SparseOptimizerConfig()
    """optimizer of the embedding tables"""
    tables: dict[str, TableOptimizerConfig] = Field(default={})
    """table name → what its optimizer has other than `sparse`"""
    freeze: list[FreezeConfig] = Field(default=[])
    """parameters that stand still; what a frozen table's optimizer keeps still follows its gradients"""

    def of_table(self, name: str) -> SparseOptimizerConfig:
        """The optimizer of a table."""
        own = self.tables.get(name, TableOptimizerConfig()).model_dump(exclude_none=True)
        return self.sparse.model_copy(update=own)
