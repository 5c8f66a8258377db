"""The trainer section: workers, steps, evaluations, early stopping and fault handling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rayrec._runtime.interval import Interval, IntervalField
from rayrec._runtime.strict import Section
from rayrec.train.config.node_labels import is_label_condition, is_label_key, parse_size

# Metrics of models that score rows.
Metric = Literal[
    "auc", "gauc", "ne", "logloss", "ece", "auprc", "accuracy", "precision", "recall", "mse", "mae", "ndcg@10",
    "recall@10", "rmse", "r2",
]  # fmt: skip
OF_GROUPS = frozenset({"gauc", "ndcg@10", "recall@10"})  # that need schema.group
LOWER_IS_BETTER = frozenset({"ne", "logloss", "ece", "mse", "mae", "rmse"})
OF_NUMBERS = frozenset({"mse", "mae", "rmse", "r2"})  # metrics of numeric labels
ONLY_OF_NUMBERS = frozenset({"rmse", "r2"})


class EarlyStoppingConfig(Section):
    """Ends the run when evaluations stop improving. With evaluations inside epochs, counts those of `trainer.eval_rows`
    rows, else all."""

    metric: str = Field(default="auc", description="evaluation metric to watch, built-in or from `trainer.metrics`")
    patience: int = Field(
        default=3, ge=1, description="consecutive evaluations without improvement before the run ends"
    )
    min_delta: float = Field(default=0.0, ge=0, description="minimum change that counts as an improvement")


class GuardsConfig(Section):
    """Ends a run that is not learning. Checked whenever metrics are logged, except at the additional first steps of a
    `trainer.log_every` that is a duration."""

    max_ne: Annotated[float, Field(gt=0)] | None = None
    """end the run if normalized entropy is above this for `patience` consecutive log lines"""
    min_auc: Annotated[float, Field(gt=0, lt=1)] | None = None
    """end the run if AUC is below this for `patience` consecutive log lines, e.g. 0.505"""
    halvings: int = Field(default=0, ge=0)
    """how often to return to the last checkpoint with half the learning rates after a non-finite loss, before the run
    ends"""
    after_steps: int = Field(default=0, ge=0, description="steps before checks begin (warm-up)")
    patience: int = Field(default=5, ge=1, description="consecutive bad log lines before the run ends")


FACTORY = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # `package.module:name`


class MetricConfig(Section):
    """An additional evaluation metric: any `torchmetrics.Metric`."""

    name: str = Field(pattern=r"^[A-Za-z][\w@.\-]*$", description="name of the metric in evaluations")
    factory: str = Field(pattern=FACTORY)
    """`package.module:Class`, e.g. `torchmetrics.classification:BinaryF1Score`; its `update` receives probabilities and
    labels (for numeric labels: predictions and values), without weights"""
    args: dict[str, Any] = Field(default={}, description="arguments of the class")
    label: str | None = Field(default=None, description="label to evaluate; `null`: the first")
    lower_is_better: bool = Field(
        default=False, description="for early stopping, `storage.keep_best` and `rayrec tune`"
    )
    training: bool = Field(default=False, description="also compute it over the training rows of each logged line")


def lower_is_better(metric: str, own: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a lower value of a metric is better; `own` are the plain values of `trainer.metrics`."""
    return metric in LOWER_IS_BETTER or any(one["name"] == metric and one.get("lower_is_better") for one in own)


class SeenConfig(Section):
    """Items that the ranking leaves out, by user, from Parquet files."""

    path: str = Field(min_length=1, description="Parquet file, folder or glob; a path or URI")
    user: str = Field(min_length=1, description="sparse feature of kind `id` that tells whose items they are")
    user_column: str | None = None
    """column of the files with its values; `null`: the column of the feature"""
    item_column: str | None = None
    """column of the files with the items; `null`: the column of the model's item feature"""


class RankingConfig(Section):
    """How evaluations of a retriever rank the items, as published protocols do it."""

    ks: list[Annotated[int, Field(ge=1)]] = Field(default=[10, 20, 50, 200], min_length=1)
    """cutoffs k of `hr@k`, `recall@k`, `ndcg@k`"""
    targets: Literal["row", "group"] = "row"
    """`group`: the rows with the same value of `schema.group`, such as a user, are the targets of one ranking:
    `recall@k` is the share of them that is found, and there are `precision@k` and `map@k`"""
    seen: list[str] = Field(default=[])
    """list features whose items the ranking leaves out, besides those of the history; mapped like the items"""
    seen_file: SeenConfig | None = None
    """more items to leave out, for example all training items of a user; `null`: none"""
    coverage: Annotated[int, Field(ge=1)] | None = None
    """k of `coverage@k`, the share of items that is among the k best of any row; `null`: not computed"""

    @property
    def names(self) -> list[str]:
        """The metrics that an evaluation has."""
        kinds = ["hr", "recall", "ndcg"] + (["precision", "map"] if self.targets == "group" else [])
        coverage = [] if self.coverage is None else [f"coverage@{self.coverage}"]
        return ["mrr", *(f"{kind}@{k}" for kind in kinds for k in self.ks), *coverage]


class ProfileConfig(Section):
    """Runs torch's profiler over some steps."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(min_length=2, max_length=2)
    """first and last step, e.g. `[100, 110]`; at most 100 steps"""
    shapes: bool = Field(default=False, description="also record the shapes of tensors")

    @model_validator(mode="after")
    def _few_steps(self) -> ProfileConfig:
        first, last = self.steps
        if not first <= last < first + 100:
            raise ValueError(
                f"steps {self.steps} must be [first, last], at most 100 steps: a trace of more cannot be read"
            )
        return self


class TrackerConfig(Section):
    """An experiment tracker that receives the metrics, the config and the report of the run. Its package must be
    installed."""

    kind: Literal["mlflow", "wandb", "comet"] = Field(description="MLflow, Weights & Biases or Comet")
    project: str = Field(default="rayrec", min_length=1, description="project, or experiment of MLflow")
    name: str | None = Field(default=None, description="name in the tracker; `null`: the name of the run")


class ResourcesConfig(Section):
    """Which nodes of a Ray cluster run the workers. Passed to Ray Train's `ScalingConfig`, and counted when the run
    waits for room."""

    accelerator_type: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.\-]*$")
    """GPU model of the nodes, as Ray names it, e.g. `H100` or `A100-80G`; `null`: any"""
    label_selector: dict[str, str] = Field(default={})
    """labels of the nodes, e.g. `{ray.io/node-group: gpu}`; a value is a label value, `!value`, `in(a, b)` or
    `!in(a, b)`"""
    memory: Annotated[int, Field(ge=2**20), BeforeValidator(parse_size)] | None = None
    """memory that each worker reserves, as a size (`64GB`, `60GiB`) or in bytes; `null`: none. Ray only counts it, and
    does not limit a worker to it"""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """`PACK`: on as few nodes as possible; `SPREAD`: on as many; `STRICT_PACK`: all on one node; `STRICT_SPREAD`: each
    on a node of its own"""

    @field_validator("label_selector")
    @classmethod
    def _valid_selector(cls, selector: dict[str, str]) -> dict[str, str]:
        for key, value in selector.items():
            if not is_label_key(key):
                raise ValueError(f"{key!r} is not the name of a label, such as region or ray.io/node-group")
            if not is_label_condition(value):
                raise ValueError(f"{key}: {value!r} must be a label value, !value, in(a, b) or !in(a, b)")
        return selector


class TrainerConfig(Section):
    """Workers, steps, evaluations and fault handling."""

    num_workers: Annotated[int, Field(ge=0)] | Annotated[list[int], Field(min_length=2, max_length=2)] = 2
    """workers, one per GPU; 0 trains in this process without Ray Train; `[least, most]`: as many as the cluster has
    room for, fewer after a failure, more when nodes are added (data reading then reserves no CPUs)"""
    batch_size: int = Field(default=1024, ge=1, description="rows per step, summed over all workers")
    micro_batches: int = Field(default=1, ge=1)
    """micro-batches per step: less activation memory, same result"""
    epochs: int = Field(default=1, ge=1, description="passes over the training rows")
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """end the run after this step, if its epochs are not complete; a relaunch with a larger value continues; `null`: no
    limit"""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """end the run after this many minutes of training, evaluations and checkpoints, summed over relaunches (without
    the start of workers, and without work that a failure discarded); a relaunch with a larger value continues; `null`:
    no limit"""
    seed: int = Field(default=0, ge=0, description="seed of the initial weights and of the row order")
    log_every: IntervalField = Interval(seconds=10)
    """interval between lines of `metrics.jsonl`; a duration also logs steps 1, 2, 3, 4, 6, 8, 12, 16, … until it has
    passed once"""
    profile: ProfileConfig | None = None
    """steps of rank 0 to record with torch's profiler; writes a trace to `profile/` in the run folder"""
    checkpoint_every: IntervalField | None = Interval(seconds=900)
    """checkpointing interval; `null`: only the final checkpoint, which is always saved"""
    eval_every: IntervalField | None = None
    """evaluation interval, in addition to the evaluation after each epoch; `null`: only that"""
    eval_rows: Annotated[int, Field(ge=1)] | None = None
    """approximate number of rows for evaluations inside an epoch, from the start of the data; `null`: all"""
    evaluate: Literal["inline", "background"] = "inline"
    """`inline`: training waits for evaluations; `background`: a process beside the workers evaluates checkpoints while
    training continues, see FAULTS.md; saves a checkpoint at each evaluation; needs `num_workers` of at least 1"""
    metrics: list[MetricConfig] = Field(default=[], description="additional evaluation metrics")
    on_batch: Annotated[str, Field(pattern=FACTORY)] | None = None
    """`package.module:function`, which every worker calls after each step with `step`, `batch`, `logits` and `loss` of
    its own rows; an error in it ends the run; `null`: none"""
    trackers: list[TrackerConfig] = Field(default=[])
    """experiment trackers; a run that resumes, also on another machine, continues its entry in each"""
    slices: list[str] = Field(default=[])
    """features whose values get separate metrics in evaluations, e.g. `[country]`: of kind `id`, with an identity or
    vocabulary mapping and a table of at most 1,000 rows"""
    ranking: RankingConfig = Field(default=RankingConfig(), description="evaluations of a retriever")
    early_stopping: EarlyStoppingConfig | None = None
    """end the run when evaluations stop improving; `null`: never"""
    guards: GuardsConfig = Field(default=GuardsConfig(), description="ends a run that is not learning")
    use_gpu: bool | Literal["auto"] = "auto"
    """`auto`: use GPUs if there are any; a machine with fewer than `num_workers` uses one worker per GPU and reports
    it"""
    cpus_per_worker: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """CPUs that each worker reserves in Ray; `auto`: up to 1, leaving half of the CPUs for reading"""
    threads_per_worker: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """compute threads per worker; `auto`: the machine's CPUs divided by its workers"""
    dense_precision: Literal["fp32", "bf16"] = "fp32"
    """precision of matrix products in the dense layers during training; weights, tables and evaluations stay fp32"""
    compile_dense: bool = False
    """compile the dense layers with `torch.compile`, which needs a C++ compiler; the first steps take up to a minute"""
    max_failures: int = Field(default=3, ge=0)
    """consecutive worker failures without a new checkpoint before the run fails"""
    grace_s: float = Field(default=30.0, ge=0)
    """seconds to save a final checkpoint after SIGTERM, Ctrl-C or a closed terminal"""
    hang_s: float = Field(default=900.0, gt=0)
    """seconds without progress before a worker reports its stacks and all workers restart"""
    resources: ResourcesConfig = Field(default=ResourcesConfig(), description="which nodes run the workers")
    wait_for_room_s: Annotated[float, Field(ge=0)] | None = None
    """seconds that the run waits for CPUs and GPUs for its workers, at the start and after losing a node, before it
    fails; `null`: no limit; 0, or `rayrec train --no-wait`: fail at once. A line every minute reports what is missing.
    More than a cluster without an autoscaler has is refused after 30 s. After the start, Ray has at least 30 s to free
    the resources of lost workers, and the limit is checked at least every two minutes"""

    @property
    def least_workers(self) -> int:
        """Minimum number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Maximum number of workers."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def own_metrics(self) -> list[dict[str, Any]]:
        """`metrics` as plain values, as `lower_is_better` takes them."""
        return [metric.model_dump() for metric in self.metrics]

    def counts_early(self, most_rows: int | None) -> bool:
        """Whether an evaluation of so many rows counts for `early_stopping`; metrics over other rows do not compare."""
        return most_rows == (self.eval_rows if self.eval_every is not None else None)

    @property
    def collective_timeout_s(self) -> int:
        """Timeout of collectives, in seconds: above `hang_s`, so that the stacks of a stuck worker are reported."""
        return math.ceil(self.hang_s) + 60

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return not isinstance(self.num_workers, int)
