"""Builds tables, model, sharders, planner constraints and the dense optimizer from the config."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayrec.data.mapping.mapping import rows_of_tables
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import Schema
from rayrec.data.mapping.spread import multiplier
from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.wire import FORMATS, Codec
from rayrec.distributed.kernel import RULES
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import CacheParams, EmbeddingComputeKernel
from rayrec.distributed.planner import ParameterConstraints
from rayrec.distributed.planner.config import ConstraintConfig
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.distributed.planner.machine.calibration import Calibration
from rayrec.models import BUILT_IN, Retriever
from rayrec.models.arguments import with_defaults
from rayrec.models.corpus import Corpus
from rayrec.models.loss import BCE, Head
from rayrec.models.loss_config import RANKER_LOSSES, RETRIEVER_LOSSES, Ziln
from rayrec.modules import DataType, EmbeddingBagConfig, PoolingType
from rayrec.optim import GradientClipping, GradientClippingOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.storage.errors import suggestion
from rayrec.train.config.file import text_of
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup.dynamic_ids import map_bytes
from rayrec.train.setup.item_features import read_item_features
from rayrec.train.setup.row_loads import row_loads

Factory = Callable[..., nn.Module]

DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
# Optimizer state elements per parameter, by dense optimizer.
STATE_PER_ELEMENT = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1}


def tables(config: TrainConfig) -> list[EmbeddingBagConfig]:
    """The embedding tables of the config."""
    bounds = [table.init if isinstance(table.init, float) else None for table in config.tables]
    return [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
            pooling=PoolingType[table.pooling.upper()],
            data_type=DataType[table.data_type.upper()],
            weight_init_max=bound,
            weight_init_min=None if bound is None else -bound,
        )
        for table, bound in zip(config.tables, bounds, strict=True)
    ]


def rows_of(config: TrainConfig) -> dict[str, int]:
    """Feature → number of rows that its ids map to: the smallest `rows` of the tables that read it."""
    return rows_of_tables((table.rows, table.features) for table in config.tables)


def model(config: TrainConfig, device: torch.device | str, factory: Factory | None = None) -> nn.Module:
    """Build the model: tables on the "meta" device, other parameters on `device`, initialized from `trainer.seed`.

    Raises:
        TrainError: an unknown model, or arguments that it does not accept.
    """
    make = factory or _factory(config)
    torch.manual_seed(config.trainer.seed)
    subject = f"model.factory={config.model.factory}" if config.model.factory else f"model.name={config.model.name}"
    if factory is not None:
        subject = f"the factory {getattr(factory, '__name__', factory)}"
    schema = config.data_schema
    extra: dict[str, Any] = {"is_weighted": True} if schema.weighted else {}
    if schema.task_names is not None:
        extra["task_weights"] = [task.weight for task in schema.tasks]
    if isinstance(config.model.loss, Ziln):
        extra["task_weights"] = [1.0] * 3  # its three outputs
    elif "number" in schema.label_kinds:
        extra["label_kinds"] = list(schema.label_kinds)
    if any(parameter.name == "dense_names" for parameter in _parameters(make)):
        extra["dense_names"] = [feature.name for feature in schema.dense for _ in range(feature.width)]
    try:
        module = make(
            tables=tables(config),
            num_dense=schema.num_dense,
            device=device,
            **extra,
            **config.model.args,
        )
    except TypeError as error:
        raise TrainError(f"model.args: {subject} does not accept them: {error}") from error
    if not isinstance(module, nn.Module):
        raise TrainError(f"{subject} returned {type(module).__name__}; an nn.Module is needed")
    if isinstance(module, Retriever) and module.has_item_features:
        names = config.model.args["item_features"]
        module.use_items(partial(read_item_features, config, module.item, names, module.num_items))
    _set_loss(config, module)
    _check_frozen(config, module)
    return module


def _parameters(make: Factory) -> list[inspect.Parameter]:
    """Empty for a callable without a signature, as some of C have none."""
    try:
        return [*inspect.signature(make).parameters.values()]
    except ValueError:
        return []


def all_args(config: TrainConfig, factory: Factory | None = None) -> dict[str, Any]:
    """`model.args` with the defaults of the arguments that the config leaves out, of a built-in model or `factory`.

    A `model.factory` is not imported; its arguments are those of the config.
    """
    if factory is not None:
        defaults = {
            each.name: each.default for each in _parameters(factory) if each.default is not inspect.Parameter.empty
        }
        return {name: [*value] if isinstance(value, tuple) else value for name, value in defaults.items()} | {
            **config.model.args
        }
    if config.model.name in BUILT_IN:
        return with_defaults(config.model.name, config.model.args)
    return config.model.args


def _factory(config: TrainConfig) -> Factory:
    if config.model.factory is not None:
        return import_factory(config.model.factory)
    if config.model.name is None:
        raise TrainError(f"model: set `name` (built in: {', '.join(BUILT_IN)}) or `factory` (a custom model)")
    if config.model.name not in BUILT_IN:
        names = ", ".join(BUILT_IN)
        raise TrainError(
            f"model.name: no built-in model is named {config.model.name!r}{suggestion(config.model.name, BUILT_IN)} "
            f"(built in: {names}); for a custom model set model.factory to package.module:function"
        )
    return BUILT_IN[config.model.name]


def import_factory(path: str, field: str = "model.factory") -> Callable[..., Any]:
    """Import the callable `package.module:function`, also from the working folder.

    Args:
        field: config field named in errors.

    Raises:
        TrainError: the module cannot be imported, or does not define the callable.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TrainError(
            f"{field}: {module_name!r} cannot be imported ({error}); install it, or move it to the working "
            f"folder {os.getcwd()}"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise TrainError(f"{field}: module {module_name!r} has no function {name!r}")
    return factory


def constraints(config: TrainConfig) -> dict[str, ParameterConstraints]:
    """Planner constraints by table name."""
    features = {table.name: len(table.features) for table in config.tables}
    loads, sections = row_loads(config), config.sharding.constraints
    return {
        name: replace(_constraint(sections.get(name, ConstraintConfig()), features[name]), row_load=loads.get(name))
        for name in features
        if name in sections or name in loads
    }


def _constraint(section: ConstraintConfig, num_features: int) -> ParameterConstraints:
    pooling, load_factor = section.pooling_factor, section.cache_load_factor
    return ParameterConstraints(
        sharding_types=section.sharding_types,
        compute_kernels=section.compute_kernels,
        min_partition=section.min_partition,
        cache_params=None if load_factor is None else CacheParams(load_factor=load_factor),
        pooling_factors=None if pooling is None else [pooling] * num_features,
    )


def fused_params(sparse: SparseOptimizerConfig) -> dict[str, Any]:
    """The embedding optimizer as `fused_params` of a sharder."""
    rule = RULES[sparse.kind]
    read = {name: getattr(sparse, name) for name in sorted(rule.reads) if hasattr(sparse, name)}
    common = {"weight_decay": sparse.weight_decay, "stochastic_rounding": sparse.stochastic_rounding}
    return {"optimizer": rule.kind, "learning_rate": sparse.lr, **read, **common}


def sharders(config: TrainConfig) -> list[ModuleSharder[Any]]:
    """One sharder per type of embedding collection that a model may contain."""
    optimizers, codec = config.optimizers, _codec(config)
    params = fused_params(optimizers.sparse)
    by_table = {name: fused_params(optimizers.of_table(name)) for name in optimizers.tables}
    for table in frozen_tables(config):
        # A learning rate of 0 puts frozen tables in a separate kernel; `worker/dense_update.py` keeps its rate at 0.
        by_table[table] = {**fused_params(optimizers.of_table(table)), "learning_rate": 0.0}
    dedup = config.sharding.dedup
    return [
        EmbeddingBagCollectionSharder(params, by_table=by_table, codec=codec),
        EmbeddingCollectionSharder(
            params, by_table=by_table, codec=codec, dedup="auto" if dedup == "auto" else dedup == "on"
        ),
    ]


def frozen(config: TrainConfig, name: str) -> float:
    """Number of steps for which a table or dense parameter is frozen: 0 if not, infinite if it is never trained."""
    steps = [freeze.until or math.inf for freeze in config.optimizers.freeze if fnmatchcase(name, freeze.names)]
    return max(steps, default=0)


def frozen_tables(config: TrainConfig) -> dict[str, float]:
    """Frozen table → number of steps for which it is frozen."""
    steps_by_table = {table.name: frozen(config, table.name) for table in config.tables}
    return {name: steps for name, steps in steps_by_table.items() if steps}


def _check_frozen(config: TrainConfig, module: nn.Module) -> None:
    names = [table.name for table in config.tables]
    weights = tuple(f".{name}.weight" for name in names)
    names += [name for name, _ in module.named_parameters() if not name.endswith(weights)]
    for number, freeze in enumerate(config.optimizers.freeze):
        if not any(fnmatchcase(name, freeze.names) for name in names):
            raise TrainError(
                f"optimizers.freeze.{number}.names: no table or parameter matches {freeze.names!r}"
                f"{suggestion(freeze.names, names)} (available: {', '.join(names)})"
            )


def _set_loss(config: TrainConfig, module: nn.Module) -> None:
    loss = config.model.loss
    of_retriever = isinstance(loss, tuple(RETRIEVER_LOSSES.values()))
    if isinstance(module, Retriever):
        if of_retriever:
            module.use_loss(loss.model_dump())
        elif loss != BCE:
            raise TrainError(
                f"model.loss: {loss.kind} is not a loss of a retriever; choose one of {', '.join(RETRIEVER_LOSSES)}"
            )
        return
    if of_retriever:
        raise TrainError(
            f"model.loss: {loss.kind} is a loss of retrievers (rayrec.models.Retriever); choose one of "
            f"{', '.join(RANKER_LOSSES)}"
        )
    heads = [submodule for submodule in module.modules() if isinstance(submodule, Head)]
    if loss != BCE and not heads:
        raise TrainError(
            "model.loss: the model computes its own loss; end it with a rayrec.models.Head, or remove model.loss"
        )
    for head in heads:
        head.loss = loss


def items_of(retriever: Retriever, schema: Schema) -> Corpus:
    """The rows of the item table that are items: with a vocabulary, those of its ids; else all."""
    rule = next((feature.mapping for feature in schema.sparse if feature.name == retriever.item), None)
    if not isinstance(rule, Vocabulary):
        return Corpus(retriever.num_items)
    spread = max((rule.spread_over or 0) - rule.oov_rows, 1)
    return Corpus(load_vocabulary(rule.path).size, rule.oov_rows, spread, multiplier(spread))


def _codec(config: TrainConfig) -> Codec:
    wire = config.sharding.wire
    scale = wire.gradient_scale if wire.gradients in ("fp16", "bf16") else 1.0
    return Codec(forward=FORMATS[wire.vectors], backward=FORMATS[wire.gradients], backward_scale=scale)


def dense_optimizer(config: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> KeyedOptimizer:
    """The optimizer of dense parameters and of tables with a dense kernel, with gradient clipping if configured."""
    dense = config.optimizers.dense
    optimizer = KeyedOptimizerWrapper(
        dict(parameters),
        # As a group, it may be empty: matrix factorization has tables only.
        lambda params: DENSE_OPTIMIZERS[dense.kind]([{"params": params}], lr=dense.lr, weight_decay=dense.weight_decay),
    )
    if dense.max_gradient_norm is None:
        return optimizer
    return GradientClippingOptimizer(optimizer, GradientClipping.NORM, dense.max_gradient_norm)


def given_plan(config: TrainConfig, world_size: int, replicas: int = 1) -> ShardingPlan | None:
    """The plan in `sharding.plan`; None if not set.

    Args:
        world_size: number of workers in one group.
        replicas: number of groups.

    Raises:
        TrainError: the file is missing or not a plan, or the plan is for more ranks or other tables.
    """
    path = config.sharding.plan
    if path is None:
        return None
    try:
        plan = ShardingPlan.from_json(text_of(Path(path)))
    except OSError as error:
        raise TrainError(f"sharding.plan: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TrainError(f"sharding.plan: {path}: {error}") from None
    if plan.min_world_size > max(1, world_size) and replicas > 1:
        raise TrainError(
            f"sharding.plan: {path} places shards on {plan.min_world_size} ranks, but each of {replicas} groups "
            f"(sharding.replicas) has {world_size} of the {world_size * replicas} workers; plan for one group, with "
            f"`rayrec plan --world {world_size}`, or lower sharding.replicas"
        )
    if plan.min_world_size > max(1, world_size):
        raise TrainError(
            f"sharding.plan: {path} places shards on {plan.min_world_size} ranks, but trainer.num_workers is "
            f"{world_size}; raise it, or make a plan for this many with `rayrec plan --world {world_size}`"
        )
    _check_plan_tables(plan, config, path)
    return plan


def calibration(config: TrainConfig) -> Calibration | None:
    """Measured speeds for the planner: `sharding.calibration`, else `calibration.json` in `storage.path` if it exists.

    Raises:
        TrainError: the file is missing or not a calibration.
    """
    named = config.sharding.calibration
    path = Path(named or Path(config.storage.path) / "calibration.json")
    if named is None and not path.is_file():
        return None
    try:
        return Calibration.read(path)
    except ValueError as error:
        source = "sharding.calibration" if named else "found in storage.path"
        raise TrainError(f"{source}: {error}") from None


def _check_plan_tables(plan: ShardingPlan, config: TrainConfig, path: str) -> None:
    shapes = {name: sharding.shape for sharded in plan.plan.values() for name, sharding in sharded.items()}
    for table in config.tables:
        shape = (table.rows, table.dim)
        if shapes.get(table.name) != shape:
            planned = f"has it as {shapes[table.name]}" if table.name in shapes else "does not have it"
            raise TrainError(
                f"sharding.plan: table {table.name!r} is {shape} (rows, dim) in the config, "
                f"but {path} {planned}; make a new plan with `rayrec plan`"
            )


def plan_memory(
    plan: ShardingPlan, config: TrainConfig, world_size: int, dense_parameters: int
) -> list[dict[str, int]]:
    """Bytes of embedding weights, optimizer state and dense part (with optimizer state and gradients) on each rank, and
    in host memory of its part of the maps of dynamic ids, if there are any.

    For a table with a dense kernel, the optimizer state includes its gradient; both have the table's data type.
    """
    dense = config.optimizers.dense.kind
    bytes_of = {table.name: 4 if table.data_type == "fp32" else 2 for table in config.tables}
    weights, state = [0] * world_size, [0] * world_size
    for _, sharding, shard in plan.shards():
        rows, cols = shard.shape
        weight_bytes = rows * cols * bytes_of[shard.table]
        weights[shard.rank] += weight_bytes
        if EmbeddingComputeKernel(sharding.compute_kernel) is EmbeddingComputeKernel.DENSE:
            state[shard.rank] += weight_bytes * (1 + STATE_PER_ELEMENT[dense])
        else:
            row_bytes, element_bytes = RULES[config.optimizers.of_table(shard.table).kind].state_bytes
            state[shard.rank] += rows * (cols * element_bytes + row_bytes)
    of_maps = map_bytes(config) // world_size
    maps = {"map_bytes": of_maps} if of_maps else {}
    dense_bytes = 4 * dense_parameters * (2 + STATE_PER_ELEMENT[dense])
    return [
        {"rank": r, "weights_bytes": weights[r], "optimizer_bytes": state[r], "dense_bytes": dense_bytes} | maps
        for r in range(world_size)
    ]


# Key in plan.json → terms of the planner's cost, which are summed.
TIMES = {
    "ids_s": ("input_intra", "input_inter"),
    "lookup_s": ("lookup",),
    "vectors_s": ("output_intra", "output_inter"),
    "gradients_s": ("gradient_intra", "gradient_inter"),
    "update_s": ("backward", "host"),
}


def plan_time(estimate: Estimate | None) -> list[dict[str, float]]:
    """Predicted seconds of the embedding part of a step on each rank, by phase."""
    if estimate is None:
        return []
    costs = [Cost(*terms) for terms in estimate.cost_RT.tolist()]
    return [
        {"rank": rank, "routing_s": estimate.fixed_s}
        | {key: sum(getattr(cost, term) for term in terms) for key, terms in TIMES.items()}
        for rank, cost in enumerate(costs)
    ]
