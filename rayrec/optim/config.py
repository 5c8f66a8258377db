"""The section `optimizers` of a train config: dense and sparse optimizers, schedules, freezing."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec._runtime.strict import Section

_PERCENT = Annotated[str, Field(pattern=r"^(100|[0-9]{1,2})(\.[0-9]+)?%$")]


class ScheduleConfig(Section):
    """The learning rate over the steps: `lr` times a factor, which warms up, stays at 1, and decays.

    Steps may be a share of the run, e.g. `5%`: of `trainer.max_steps`, or of the steps of all epochs if they are fewer.
    """

    kind: Literal["constant", "linear", "step", "cosine", "polynomial"] = "constant"
    """how it decays: not at all; on a line; by `gamma` every `decay_steps`; on half a cosine; as `(1 - t)^power`, which
    with `power: 2` is MLPerf's DLRM"""
    warmup_steps: Annotated[int, Field(ge=0)] | _PERCENT = 0
    """steps from `warmup_from` up to 1, on a line; or a share of the run, e.g. `5%`"""
    warmup_from: float = Field(default=0.0, ge=0, le=1, description="factor that the warm-up starts from")
    decay_from: Annotated[int, Field(ge=0)] | _PERCENT = 0
    """step that the decay starts at, at the earliest after warm-up; or a share of the run"""
    decay_steps: Annotated[int, Field(ge=1)] | _PERCENT | None = None
    """steps of the decay, or between two of `step`; or a share of the run; needed where there is a decay"""
    end: float = Field(default=0.0, ge=0, le=1, description="factor after the decay (not read by `step`)")
    power: float = Field(default=2.0, gt=0, description="of `polynomial`")
    gamma: float = Field(default=0.1, gt=0, le=1, description="of `step`")

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> ScheduleConfig:
        if self.kind != "constant" and self.decay_steps is None:
            raise ValueError(f"kind {self.kind!r} needs `decay_steps`")
        return self

    @property
    def shares(self) -> list[str]:
        """Fields that are a share of the run."""
        return [name for name in ("warmup_steps", "decay_from", "decay_steps") if isinstance(getattr(self, name), str)]

    def factor(self, step: int, total_steps: int = 0) -> float:
        """Multiplier of the learning rate at a step, counted from 0.

        It is 1 at the last warm-up step, and `end` from the first step after the decay.

        Args:
            total_steps: planned steps of the run, for fields that are a share of it.
        """
        warmup, decay_from = _in_steps(self.warmup_steps, total_steps), _in_steps(self.decay_from, total_steps)
        if step < warmup:
            done = (step + 1) / warmup
            return self.warmup_from + (1 - self.warmup_from) * done
        since = step - max(decay_from, warmup)
        if self.kind == "constant" or self.decay_steps is None or since < 0:
            return 1.0
        decay = max(1, _in_steps(self.decay_steps, total_steps))
        if self.kind == "step":
            return float(self.gamma ** (since // decay))
        left = 1 - min(1.0, since / decay)
        shape = {
            "linear": left,
            "cosine": (1 - math.cos(math.pi * left)) / 2,
            "polynomial": left**self.power,
        }[self.kind]
        return float(self.end + (1 - self.end) * shape)


def _in_steps(value: int | str, total_steps: int) -> int:
    return value if isinstance(value, int) else round(float(value.removesuffix("%")) / 100 * total_steps)


class PlateauConfig(Section):
    """Reduces all learning rates, beside their schedules, when evaluations stop improving. Counts the same evaluations
    as `trainer.early_stopping`."""

    metric: str = Field(default="auc", description="evaluation metric to watch, built-in or from `trainer.metrics`")
    patience: int = Field(default=2, ge=1, description="consecutive evaluations without improvement before a reduction")
    min_delta: float = Field(default=0.0, ge=0, description="minimum change that counts as an improvement")
    factor: float = Field(default=0.1, gt=0, lt=1, description="multiplies the learning rates in each reduction")
    min_factor: float = Field(default=0.0, ge=0, lt=1, description="lower limit of the product of all reductions")


class DenseOptimizerConfig(Section):
    """Trains everything that is not an embedding table, and tables whose kernel is `dense`."""

    kind: Literal["sgd", "adam", "adamw", "adagrad", "rmsprop"] = Field(default="adam", description="the optimizer")
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
    plateau: PlateauConfig | None = None
    """reduce the learning rates when evaluations stop improving; `null`: never"""
    freeze: list[FreezeConfig] = Field(default=[])
    """parameters that stand still; what a frozen table's optimizer keeps still follows its gradients"""

    def of_table(self, name: str) -> SparseOptimizerConfig:
        """The optimizer of a table."""
        own = self.tables.get(name, TableOptimizerConfig()).model_dump(exclude_none=True)
        return self.sparse.model_copy(update=own)
