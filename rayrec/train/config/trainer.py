"""How the run goes: workers, steps, evaluations, when it ends early, and what is done about faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rayrec.data.strict import Section

Metric = Literal[
    "auc", "gauc", "ne", "logloss", "auprc", "accuracy", "precision", "recall", "mse", "mae", "ndcg@10", "recall@10",
    "rmse", "r2",
]  # fmt: skip
LOWER_IS_BETTER = frozenset({"ne", "logloss", "mse", "mae", "rmse"})
OF_NUMBERS = frozenset({"mse", "mae", "rmse", "r2"})  # figures of a label that is a number
ONLY_OF_NUMBERS = frozenset({"rmse", "r2"})


class EarlyStoppingConfig(Section):
    """Ends the run when evaluations do not get better any more: those within epochs, where `trainer.eval_rows` limits
    them, else all."""

    metric: str = Field(default="auc", description="figure of the evaluation that counts, own ones too")
    patience: int = Field(default=3, ge=1, description="evaluations in a row without improvement that end the run")
    min_delta: float = Field(default=0.0, ge=0, description="least change that is an improvement")


class GuardsConfig(Section):
    """What ends a run that learns nothing; checked where figures are logged."""

    max_ne: Annotated[float, Field(gt=0)] | None = None
    """normalized entropy above which, `patience` times in a row, the run ends"""
    min_auc: Annotated[float, Field(gt=0, lt=1)] | None = None
    """AUC below which, `patience` times in a row, the run ends, e.g. 0.505"""
    halvings: int = Field(default=0, ge=0)
    """how often training goes back to the last checkpoint with half the learning rates where the loss is not finite any
    more, before that ends the run"""
    after_steps: int = Field(default=0, ge=0, description="steps without checks (warm-up)")
    patience: int = Field(default=5, ge=1, description="logged lines in a row that must be bad")


class MetricConfig(Section):
    """A figure of one's own in evaluations: any `torchmetrics.Metric`."""

    name: str = Field(pattern=r"^[A-Za-z][\w@.\-]*$", description="its name among the evaluation's figures")
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:Class`, e.g. `torchmetrics.classification:BinaryF1Score`; its `update` gets probabilities and
    labels (of a number: predictions and numbers), without weights"""
    args: dict[str, Any] = Field(default={}, description="arguments of the class")
    label: str | None = Field(default=None, description="which of several labels; `null`: the first")
    lower_is_better: bool = Field(default=False, description="for early stopping, the best checkpoint, and searches")


def lower_is_better(metric: str, own: Sequence[Mapping[str, Any]]) -> bool:
    """Whether less of a figure is better; `own` are the plain values of `trainer.metrics`."""
    return metric in LOWER_IS_BETTER or any(one["name"] == metric and one.get("lower_is_better") for one in own)


class ProfileConfig(Section):
    """torch's profiler over some steps."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(min_length=2, max_length=2)
    """first and last step, e.g. `[100, 110]`; at most 100 of them"""
    shapes: bool = Field(default=False, description="also record the shapes of tensors")

    @model_validator(mode="after")
    def _few_steps(self) -> ProfileConfig:
        first, last = self.steps
        if not first <= last < first + 100:
            raise ValueError(
                f"steps {self.steps} must be [first, last], at most 100 steps: a trace of more cannot be read"
            )
        return self


class TrainerConfig(Section):
    """How the run goes."""

    num_workers: Annotated[int, Field(ge=0)] | Annotated[list[int], Field(min_length=2, max_length=2)] = 2
    """workers, one a GPU; 0 trains in this process, without Ray Train; `[least, most]`: as many as the cluster has room
    for, fewer after a loss, more when nodes come (reads then reserve no CPUs)"""
    batch_size: int = Field(default=1024, ge=1, description="rows of a step, over all workers together")
    micro_batches: int = Field(default=1, ge=1)
    """parts that a worker works through a batch in, one after the other, for less memory; the step is the same, for
    tables too"""
    epochs: int = Field(default=1, ge=1, description="passes over the training rows")
    seed: int = Field(default=0, ge=0, description="seed of weights and of the order of rows")
    log_every: Annotated[int, Field(ge=1)] | None = None
    """steps between two lines of `metrics.jsonl`; `null`: by `log_every_s`"""
    log_every_s: float = Field(default=10.0, gt=0)
    """seconds between two lines of `metrics.jsonl`, where `log_every` is `null`"""
    profile: ProfileConfig | None = None
    """record these steps of rank 0 with torch's profiler, as a trace in `profile/` of the run folder"""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """steps between two checkpoints, `null`: not by steps; one more is made at the end"""
    checkpoint_every_minutes: Annotated[float, Field(gt=0)] | None = 15.0
    """the same in minutes; both may be given"""
    eval_every: Annotated[int, Field(ge=1)] | None = None
    """steps between two evaluations within an epoch; one more is made at its end"""
    eval_every_minutes: Annotated[float, Field(gt=0)] | None = None
    """the same in minutes; both may be given"""
    eval_rows: Annotated[int, Field(ge=1)] | None = None
    """about how many of the first rows evaluations within an epoch read; `null`: all"""
    metrics: list[MetricConfig] = Field(default=[], description="further figures of evaluations")
    slices: list[str] = Field(default=[])
    """features for whose values evaluations give figures of their own, e.g. `[country]`: of kind `id`, mapped by
    identity or a vocabulary, with a table of at most 1,000 rows"""
    early_stopping: EarlyStoppingConfig | None = None
    """end when evaluations do not get better any more; `null`: never"""
    guards: GuardsConfig = Field(default=GuardsConfig(), description="what ends a run that learns nothing")
    use_gpu: bool | Literal["auto"] = "auto"
    """`auto`: GPUs where there are any; a machine with fewer than `num_workers` trains with one worker a GPU, and says
    so"""
    cpus_per_worker: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """CPUs a worker reserves in Ray; `auto`: up to 1, leaving half of the CPUs for reading"""
    threads_per_worker: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """compute threads of a worker; `auto`: the CPUs of a machine shared by its workers"""
    dense_precision: Literal["fp32", "bf16"] = "fp32"
    """of the products in the dense part while training; weights, tables and evaluations stay fp32"""
    compile_dense: bool = False
    """compile the dense layers (`torch.compile`; needs a C++ compiler): the first steps take up to a minute"""
    max_failures: int = Field(default=3, ge=0)
    """how often in a row workers may fail without a new checkpoint before the run fails"""
    grace_s: float = Field(default=30.0, ge=0)
    """seconds that SIGTERM, Ctrl-C or a closed terminal leave for a last checkpoint before the run ends"""
    hang_s: float = Field(default=900.0, gt=0)
    """seconds without any movement after which a worker reports its stacks and all workers restart"""
    wait_for_resources_s: float = Field(default=30.0, ge=0)
    """seconds to wait for a cluster's CPUs and GPUs to become free before refusing"""
    wait_for_room_s: Annotated[float, Field(gt=0)] | None = None
    """seconds that a run which lost a node waits for room for its workers before it fails; `null`: until there is room.
    Looked at every two minutes at least; a line every minute says what is missing"""
    timeout_s: int = Field(default=300, ge=1, description="seconds after which a stuck exchange between workers fails")

    @property
    def least_workers(self) -> int:
        """Workers that the run needs to go on."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Workers that the run has where there is room."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def own_metrics(self) -> list[dict[str, Any]]:
        """`metrics` as plain values, as `lower_is_better` takes them."""
        return [metric.model_dump() for metric in self.metrics]

    def counts_early(self, most_rows: int | None) -> bool:
        """Whether an evaluation of so many rows counts for `early_stopping`: figures of unlike rows do not compare."""
        within_epochs = self.eval_every is not None or self.eval_every_minutes is not None
        return most_rows == (self.eval_rows if within_epochs else None)

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change while the run goes on."""
        return not isinstance(self.num_workers, int)
