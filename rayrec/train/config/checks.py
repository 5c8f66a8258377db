"""Checks across sections of the config: tables against schema, model, constraints and batch size.

Each check raises PydanticCustomError for the first problem; the error's context holds the field path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from rayrec._runtime.strict import refusal
from rayrec.checkpoint.config import StorageConfig
from rayrec.data.config import DataConfig
from rayrec.data.mapping.rules import Hash
from rayrec.data.mapping.schema import DenseFeature, Schema, SparseFeature
from rayrec.data.source.dataset import data_sets
from rayrec.distributed.planner.config import ShardingConfig
from rayrec.metrics.buckets import MAX_BUCKETS
from rayrec.models import BUILT_IN, RETRIEVERS
from rayrec.models.arguments import args_of
from rayrec.models.config import ModelConfig, TableConfig
from rayrec.models.loss_config import NUMBER_LOSSES, Bce, InBatch, Mixed, Ziln
from rayrec.optim.config import OptimizersConfig
from rayrec.storage.errors import suggestion
from rayrec.storage.secrets import secret_in
from rayrec.train.config.trainer import OF_NUMBERS, ONLY_OF_NUMBERS, Metric, TrainerConfig


def check_tables(tables: Sequence[TableConfig], schema: Schema) -> None:
    """Table names are unique, tables read existing features, and every sparse feature is read by a table."""
    repeated = [name for name, times in Counter(t.name for t in tables).items() if times > 1]
    if repeated:
        raise refusal("tables", f"table name {repeated[0]!r} is used twice; names are unique")
    sparse_names = [feature.name for feature in schema.sparse]
    for table in tables:
        for feature in table.features:
            if feature not in sparse_names:
                hint = f"{suggestion(feature, sparse_names)} (schema.sparse has {', '.join(sparse_names)})"
                raise refusal(
                    f"tables.{table.name}.features",
                    f"table {table.name!r}: {feature!r} is not a sparse feature of the schema{hint}",
                )
    read = {feature for table in tables for feature in table.features}
    for name in sparse_names:
        if name not in read:
            raise refusal(
                f"schema.sparse.{name}",
                f"no table reads feature {name!r}; add it to the `features` of a table, or remove it from the schema",
            )


def check_named_tables(field: str, named: Iterable[str], tables: Sequence[TableConfig]) -> None:
    """The tables named in `field` exist."""
    names = [table.name for table in tables]
    for name in named:
        if name not in names:
            hint = f"{suggestion(name, names)} (tables: {', '.join(names)})"
            raise refusal(f"{field}.{name}", f"no table is named {name!r}{hint}")


def check_micro_batches(model: ModelConfig, trainer: TrainerConfig) -> None:
    """A loss that compares the rows of a batch allows only one micro-batch."""
    subject = f"model {model.name}" if model.name in RETRIEVERS else f"model.loss {model.loss.kind}"
    if trainer.micro_batches > 1 and model.loss.compares_rows:
        raise refusal("trainer.micro_batches", f"{subject} compares all rows of a batch in its loss; set it to 1")


def check_attention(model: ModelConfig, schema: Schema) -> None:
    """The history of an attention is one sequence without target or label columns, and fits `max_length`."""
    if model.name not in BUILT_IN:
        return
    column_of = {feature.name: feature.column for feature in schema.sparse}
    for index, attention in enumerate(model.args.get("attention") or ()):
        path, history = f"model.args.attention.{index}", list(attention.get("history", ()))
        if set(attention) != {"history", "target"}:
            raise refusal(path, f"it needs `history` and `target`, lists of features; it has {sorted(attention)}")
        if len(history) > 1 and not any(set(history) <= set(sequence.ids) for sequence in schema.sequences):
            raise refusal(
                path, f"history {history} must be lists of one sequence; list them together in schema.sequences"
            )
        lengths = [feature.max_length for feature in schema.sparse if feature.name in history]
        limit = getattr(args_of(model.name)(**model.args), "max_length", None)
        if limit is not None and any(length is None or length > limit for length in lengths):
            raise refusal(
                "model.args.max_length", f"{limit} is less than {history} may have: {lengths}; cut them to it"
            )
        read = {column_of.get(name, name) for name in history}
        targets = {column_of.get(name, name) for name in attention["target"] if name is not None}
        targets |= {task.column for task in schema.tasks}
        if shared := sorted(read & targets):
            raise refusal(
                path, f"column {shared[0]!r} is both the target and part of its history; use another history column"
            )


IN_UNIT_INTERVAL = frozenset({"quantile", "min_max"})


def check_numbers(model: ModelConfig, schema: Schema) -> None:
    """Numbers with a piecewise-linear encoding are in [0, 1]."""
    if model.name not in BUILT_IN or model.args.get("numbers") != "piecewise":
        return
    for index, feature in enumerate(schema.dense):
        if not feature.transforms or feature.transforms[-1].kind not in IN_UNIT_INTERVAL:
            raise refusal(
                f"schema.dense.{index}.transforms",
                f"model.args.numbers=piecewise needs numbers in [0, 1], but the transforms of {feature.name!r} do not "
                "end with `quantile` or `min_max`; add one",
            )


def check_dlrm(model: ModelConfig, tables: Sequence[TableConfig], schema: Schema) -> None:
    """The layer widths of DLRM match its tables and labels."""
    if model.name != "dlrm":
        return
    dims = sorted({table.dim for table in tables})
    if len(dims) > 1:
        raise refusal("tables", f"model dlrm needs one dim for all tables, but they have {dims}")
    arch = model.args.get("dense_arch")
    if isinstance(arch, list) and arch and arch[-1] != dims[0]:
        raise refusal(
            "model.args.dense_arch",
            f"{arch} must end with the dim of the tables, {dims[0]}: the dense features become one more vector of it",
        )
    over = model.args.get("over_arch")
    num_labels = 3 if isinstance(model.loss, Ziln) else len(schema.tasks)
    if isinstance(over, list) and over and over[-1] != num_labels:
        logits = "one logit a row" if num_labels == 1 else "one logit a row for each label"
        raise refusal("model.args.over_arch", f"{over} must end with {num_labels}: the model gives {logits}")


READ_A_HISTORY_ONLY = frozenset({"sasrec", "hstu"})


def unread_inputs(model: ModelConfig, tables: Sequence[TableConfig], schema: Schema) -> str | None:
    """What the config has and the model would not read, or must not read, with the fix; None if there is nothing.

    It is not a check of each config, as earlier versions trained such runs, which can still be evaluated and served.
    """
    if model.name == "two_tower":
        return _query_that_reads_the_item(model, schema)
    if model.name not in READ_A_HISTORY_ONLY:
        return None
    history, side = model.args["history"], model.args.get("side", [])
    own = model.args.get("item_features", [])
    named = f" and the side features {', '.join(map(repr, side))}" if side else ""
    named += f", and of items {', '.join(map(repr, own))}" if own else ""
    subject = f"model {model.name} reads only the history {history!r}{named}"
    for table in tables:
        unread = [feature for feature in table.features if feature not in (history, *side, *own)]
        if len(unread) == len(table.features):
            return f"tables.{table.name}: {subject}; remove this table and its features: {', '.join(unread)}"
        if unread:
            return f"tables.{table.name}.features: {subject}; remove {', '.join(unread)} here and from schema.sparse"
    if numbers := [feature.name for feature in schema.dense if feature.name not in own]:
        return f"schema.dense: {subject}; remove {'this section' if not own else ', '.join(numbers)}"
    return None


def _query_that_reads_the_item(model: ModelConfig, schema: Schema) -> str | None:
    """A query that knew features of the item would know the answer, and no request has them."""
    item = next((one for one in schema.sparse if one.name == model.args["item"]), None)
    if item is None:
        return None  # the model names it
    every: list[DenseFeature | SparseFeature] = [*schema.dense, *schema.sparse]
    for feature in every:
        if feature.name in (item.name, *model.args.get("item_features", ())):
            continue
        if item.column in schema.sources_beside_times(feature):
            mend = "remove it" if feature.column == item.column else "add it to item_features, or remove it"
            return (
                f"model.args.item_features: feature {feature.name!r} reads the item's column {item.column!r}, "
                f"which the query of model two_tower must not know; {mend}"
            )
    return None


def check_item_features(model: ModelConfig, schema: Schema) -> None:
    """Item features are those of the item in any row, so that items without a row have them, too."""
    names = model.args.get("item_features") if model.name in RETRIEVERS else None
    if not names:
        return
    every: list[DenseFeature | SparseFeature] = [*schema.dense, *schema.sparse]
    features = {one.name: one for one in every}
    item = features.get(str(model.args["item" if model.name == "two_tower" else "history"]))
    if item is None:
        return  # the model names it
    of_rows = {*model.args.get("side", ()), *(name for sequence in schema.sequences for name in sequence.ids)}
    if item.name in schema.dynamic:
        raise refusal("model.args.item_features", f"item {item.name!r} has dynamic ids, whose rows change owners")
    derived = {spec.name: spec for spec in schema.derived}
    for name in names:
        if name not in features or name == item.name:
            known = [feature for feature in features if feature != item.name]
            raise refusal("model.args.item_features", f"no feature is named {name!r}{suggestion(name, known)}")
        if model.name in READ_A_HISTORY_ONLY and name in of_rows:
            raise refusal(
                "model.args.item_features",
                f"{name!r} is a list of the rows, in `side` or a sequence; items need it without a row: add a feature "
                f"of another name with `from: TABLE.COLUMN` and `by: {item.column}`, which may share the table",
            )
        if features[name].column == item.column:
            raise refusal(
                "model.args.item_features",
                f"{name!r} reads the item {item.column!r} itself, whose id the tower reads already: remove it",
            )
        for column in schema.sources_beside_times(features[name]):
            if column != item.column or column in derived:
                raise refusal(
                    "model.args.item_features",
                    f"{name!r} reads the column {column!r} of the rows; items need it without a row: list them in "
                    f"data.entities, and read it with `from: TABLE.COLUMN` and `by: {item.column}`",
                )


def check_esmm(model: ModelConfig, schema: Schema) -> None:
    """The labels of ESMM are observed in all rows."""
    for number, task in enumerate(schema.tasks):
        if model.name == "esmm" and task.given is not None:
            raise refusal(
                f"schema.labels.{number}.given",
                "model esmm learns click and conversion from all rows, where a row without a click is one without a "
                f"conversion: remove `given: {task.given}` of label {task.name!r}; it must be 0 without a click",
            )


def check_labels(
    model: ModelConfig, schema: Schema, trainer: TrainerConfig, storage: StorageConfig, data: DataConfig
) -> None:
    """Early stopping and `keep_best` use metrics that evaluations have, and negative sampling has binary labels."""
    kinds = schema.label_kinds
    if trainer.early_stopping is not None:
        _check_metric("trainer.early_stopping.metric", trainer.early_stopping.metric, model, schema, trainer)
    if storage.keep_best is not None:
        _check_metric("storage.keep_best", storage.keep_best.metric, model, schema, trainer)
    if data.negative_rate < 1 and any(task.made_of_values for task in schema.tasks):
        raise refusal(
            "data.negative_rate",
            "negatives are rows with 0 in the label column; for labels with `positive` or `at_least`, set it to 1 or "
            "write the labels as 0 and 1",
        )
    if "number" in kinds and data.negative_rate < 1:
        raise refusal(
            "data.negative_rate", "negative sampling needs binary labels, but a label has `kind: number`; set it to 1"
        )


def metric_names(model: ModelConfig, schema: Schema, trainer: TrainerConfig) -> list[str]:
    """The metrics of evaluations: those of a model that scores rows, or of one that ranks items; both for a model of
    the user."""
    if model.name in RETRIEVERS:
        return trainer.ranking.names
    is_number = schema.label_kinds[0] == "number"
    names = [name for name in get_args(Metric) if (name in OF_NUMBERS if is_number else name not in ONLY_OF_NUMBERS)]
    names += [metric.name for metric in trainer.metrics]
    return names if model.name in BUILT_IN else list(dict.fromkeys([*names, *trainer.ranking.names]))


def _check_metric(field: str, metric: str, model: ModelConfig, schema: Schema, trainer: TrainerConfig) -> None:
    """Evaluations have the metric named in `field`."""
    names = metric_names(model, schema, trainer)
    if metric in names:
        return
    if model.name not in RETRIEVERS and metric in get_args(Metric):
        if schema.label_kinds[0] == "number":
            allowed = ", ".join(sorted(OF_NUMBERS))
            raise refusal(field, f"{metric} needs a binary label; allowed for `kind: number`: {allowed}")
        raise refusal(field, f"{metric} needs a label of `kind: number`")
    raise refusal(
        field, f"got {metric!r}{suggestion(metric, names)}; evaluations of model {model.name} have {', '.join(names)}"
    )


def check_ranking(model: ModelConfig, schema: Schema, trainer: TrainerConfig) -> None:
    """The features that a ranking reads exist and have the items' mapping, and rows have groups if these are ranked."""
    ranking, by_name = trainer.ranking, {feature.name: feature for feature in schema.sparse}
    if model.name in BUILT_IN and model.name not in RETRIEVERS:
        if ranking != type(ranking)():
            raise refusal("trainer.ranking", f"model {model.name} scores rows and ranks no items; remove this section")
        return
    if ranking.targets == "group" and schema.group is None:
        raise refusal("trainer.ranking.targets", "group needs schema.group, for example the user")
    item = by_name.get(str(model.args.get("item" if model.name == "two_tower" else "history")))
    for number, name in enumerate(ranking.seen):
        field = f"trainer.ranking.seen.{number}"
        if name not in by_name:
            raise refusal(field, f"no sparse feature is named {name!r}{suggestion(name, by_name)}")
        if item is not None and by_name[name].mapping != item.mapping:
            raise refusal(field, f"{name!r} must map ids as {item.name!r} does, to be left out of the items")
    user = None if ranking.seen_file is None else ranking.seen_file.user
    if user is not None and (user not in by_name or by_name[user].kind != "id"):
        raise refusal("trainer.ranking.seen_file.user", f"no sparse feature of kind id is named {user!r}")


def check_schedules(
    optimizers: OptimizersConfig, trainer: TrainerConfig, data: DataConfig, schema: Schema, model: ModelConfig
) -> None:
    """A plateau has evaluations to watch, and a schedule that is a share of the run has a known number of steps."""
    if optimizers.plateau is not None:
        _check_metric("optimizers.plateau.metric", optimizers.plateau.metric, model, schema, trainer)
        if data.eval is None and not data.windowed:
            raise refusal("optimizers.plateau", "it watches evaluations: set data.eval")
    filtered = data.negative_rate < 1 or any(data_set.filters for data_set in data_sets(data.train))
    if trainer.max_steps is not None or not (filtered or data.windowed or data.follow is not None):
        return
    for part, schedule in (("dense", optimizers.dense.schedule), ("sparse", optimizers.sparse.schedule)):
        for name in schedule.shares:
            raise refusal(
                f"optimizers.{part}.schedule.{name}",
                "the steps of a run with data.order, data.progressive, data.follow, filters or data.negative_rate are "
                "not known at its start: set trainer.max_steps, or a number of steps instead of "
                f"{getattr(schedule, name)}",
            )


def check_loss(model: ModelConfig, schema: Schema) -> None:
    """The loss applies to the labels."""
    loss, kinds = model.loss, schema.label_kinds
    if isinstance(loss, NUMBER_LOSSES) and "number" not in kinds:
        raise refusal("model.loss", f"{loss.kind} needs a label of `kind: number`")
    if not isinstance(loss, NUMBER_LOSSES) and loss != Bce() and set(kinds) == {"number"}:
        allowed = ", ".join(kind.model_fields["kind"].default for kind in NUMBER_LOSSES)
        raise refusal(
            "model.loss",
            f"{loss.kind} needs a binary label; labels of `kind: number` have the squared error, or {allowed}",
        )
    if len(kinds) > 1 and model.name not in RETRIEVERS and (loss.compares_rows or isinstance(loss, Ziln)):
        raise refusal("model.loss", f"{loss.kind} works with one label; choose bce, focal or mse")
    if loss.by_group and schema.group is None:
        raise refusal("model.loss", f"{loss.kind} compares the rows of a group, such as a user: set schema.group")
    if isinstance(loss, InBatch | Mixed) and loss.hard_negatives and model.name in READ_A_HISTORY_ONLY:
        raise refusal("model.loss.hard_negatives", f"model {model.name} learns from histories, which have no label 0")


# Fields of the lines of training in metrics.jsonl.
OF_TRAINING = frozenset({"kind", "time", "attempt", "step", "epoch", "loss", "lr", "samples", "samples_per_second"})
OF_TRAINING |= {"data_wait_fraction", "exchange_fraction", "stall_fraction", "gradient_norm", "tables", "partial"}
OF_TRAINING |= {"lookups_by_rank", "window"}


def check_metrics(trainer: TrainerConfig, schema: Schema) -> None:
    """Additional metrics have unique names and existing labels."""
    used_names = {
        *get_args(Metric),
        "calibration",
        "samples",
        "ctr",
        "tasks",
        "sets",
        "by_time",
        "by_value",
        "reliability",
        "window",
    }
    labels = [task.name for task in schema.tasks]
    for number, metric in enumerate(trainer.metrics):
        if metric.name in used_names or (metric.training and metric.name in OF_TRAINING):
            raise refusal(f"trainer.metrics.{number}.name", f"{metric.name!r} is already used; choose another name")
        used_names.add(metric.name)
        if metric.label is not None and metric.label not in labels:
            hint = f"{suggestion(metric.label, labels)} (labels: {', '.join(labels)})"
            raise refusal(f"trainer.metrics.{number}.label", f"no label is named {metric.label!r}{hint}")


def check_slices(trainer: TrainerConfig, tables: Sequence[TableConfig], schema: Schema) -> None:
    """Slices use features with one id per row and few, invertible ids."""
    by_name = {feature.name: feature for feature in schema.sparse}
    for number, name in enumerate(trainer.slices):
        field = f"trainer.slices.{number}"
        if name not in by_name:
            names = list(by_name)
            raise refusal(field, f"no sparse feature is named {name!r}{suggestion(name, names)} ({', '.join(names)})")
        feature = by_name[name]
        rows = next(table.rows for table in tables if name in table.features)
        if feature.kind != "id" or isinstance(feature.mapping, Hash):
            raise refusal(field, f"{name!r} must be of kind id, mapped by identity or a vocabulary")
        if rows > MAX_BUCKETS:
            raise refusal(field, f"{name!r} has a table of {rows:,} rows; slices may have {MAX_BUCKETS:,}")


def check_secrets(value: Any, field: str = "") -> None:
    """No string in the config contains credentials: the whole config is written to the run folder."""
    if isinstance(value, BaseModel):  # a section that was made in Python
        value = value.model_dump(mode="json", by_alias=True)
    if isinstance(value, str) and (problem := secret_in(value)) is not None:
        raise refusal(field, problem)
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_secrets(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            check_secrets(item, field)


def check_replicas(sharding: ShardingConfig, trainer: TrainerConfig) -> None:
    """The number of groups divides the number of workers."""
    replicas = sharding.replicas
    if replicas == "auto" or trainer.elastic or max(1, trainer.most_workers) % replicas == 0:
        return
    fit = ", ".join(str(n) for n in range(1, max(1, trainer.most_workers) + 1) if trainer.most_workers % n == 0)
    raise refusal(
        "sharding.replicas",
        f"{trainer.most_workers} workers (trainer.num_workers) cannot be split into {replicas} groups of equal size; "
        f"allowed: {fit or 1}",
    )


def check_trainer(trainer: TrainerConfig) -> None:
    """Workers, batch size and device are consistent."""
    if trainer.elastic and not 1 <= trainer.least_workers <= trainer.most_workers:
        raise refusal("trainer.num_workers", f"{trainer.num_workers} must be [least, most] with 1 ≤ least ≤ most")
    if trainer.batch_size < trainer.most_workers:
        raise refusal(
            "trainer.batch_size",
            f"{trainer.batch_size} rows a step cannot be dealt to {trainer.most_workers} workers; "
            f"it is the batch of all workers together, so at least {trainer.most_workers}",
        )
    if trainer.num_workers == 0 and trainer.use_gpu is True:
        raise refusal("trainer.use_gpu", "num_workers: 0 trains in this process, on CPU; use num_workers: 1 for a GPU")
    if trainer.num_workers == 0 and trainer.evaluate == "background":
        raise refusal(
            "trainer.evaluate",
            "num_workers: 0 trains in this process, without Ray, which runs evaluations in the background; use "
            "num_workers: 1, or evaluate: inline",
        )
    selection = trainer.resources
    if trainer.elastic and (selection.label_selector or selection.placement_strategy.startswith("STRICT")):
        # Ray counts every node when it chooses the size, and would then wait for workers that fit nowhere.
        raise refusal(
            "trainer.resources",
            "label_selector and the STRICT placement strategies need a fixed number of workers; set "
            "trainer.num_workers to one number",
        )
    if trainer.num_workers == 0 and trainer.resources != type(trainer.resources)():
        raise refusal(
            "trainer.resources",
            "num_workers: 0 trains in this process, without Ray; use num_workers: 1 for a node of the cluster",
        )


def check_data(data: DataConfig, schema: Schema) -> None:
    """The order of time has a column of times, and negative sampling works with these labels."""
    if data.order is not None and schema.timestamp is None:
        raise refusal("data.order", "time needs schema.timestamp, the column with the time of the rows")
    for name in ("until", "backfill"):
        if data.follow is not None and getattr(data.follow, name) is not None and schema.timestamp is None:
            raise refusal(f"data.follow.{name}", "needs schema.timestamp, the column with the time of the rows")
    if data.negative_rate < 1 and len(schema.tasks) > 1:
        raise refusal(
            "data.negative_rate",
            "works with one label: of several, a row may be a negative for one and a positive for another; set it to 1",
        )
