"""Checks of tables with dynamic ids across sections of the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rayrec._runtime.strict import refusal
from rayrec.data.mapping.rules import Dynamic
from rayrec.data.mapping.schema import Schema
from rayrec.distributed.planner.config import ShardingConfig
from rayrec.dynamic_ids.table_maps import connected
from rayrec.models.config import TableConfig
from rayrec.train.config.trainer import TrainerConfig


def check_dynamic(
    tables: Sequence[TableConfig],
    schema: Schema,
    sharding: ShardingConfig,
    trainer: TrainerConfig,
) -> None:
    """Tables with dynamic ids have equal rules and rows, and are sharded in a way that knows such ids."""
    rules, by_name = schema.dynamic, {table.name: table for table in tables}
    if not rules:
        return
    for names, features in connected([(table.name, table.features) for table in tables], rules):
        _check_rules(names[0], features, rules)
        _check_rows([by_name[name] for name in names], rules[features[0]])
        for name in names:
            _check_table(by_name[name], sharding)
    if sharding.replicas != 1:
        raise refusal("sharding.replicas", "2D parallelism is not possible with dynamic ids; set it to 1")
    for number, name in enumerate(trainer.slices):
        if name in rules:
            raise refusal(f"trainer.slices.{number}", f"{name!r} has dynamic ids, whose rows change owners; remove it")


def shared_rules(tables: Sequence[TableConfig], schema: Schema) -> Schema:
    """The schema, in which `evict` and `admit` are open only where no feature that shares the rows sets them."""
    rules = schema.dynamic
    for _, features in connected([(table.name, table.features) for table in tables], rules):
        group = [rules[name] for name in features]
        rules |= {name: _filled(rules[name], group) for name in features}
    sparse = [one.model_copy(update={"mapping": rules.get(one.name, one.mapping)}) for one in schema.sparse]
    return schema.model_copy(update={"sparse": sparse})


def _filled(rule: Dynamic, others: Iterable[Dynamic]) -> Dynamic:
    """The rule with its open fields as in the first of the others that sets them."""
    for other in others:
        if rule.evict is None:  # then it has no half-life either
            rule = rule.model_copy(update={"evict": other.evict, "half_life": other.half_life})
        if rule.admit is None:
            rule = rule.model_copy(update={"admit": other.admit})
    return rule


def _check_rules(table: str, features: Sequence[str], rules: Mapping[str, Dynamic]) -> None:
    for name in features:
        if name in rules and rules[name].path is not None:
            raise refusal(f"schema.sparse.{name}.mapping.path", "only exports have a file of ids; remove it")
    group = [rules[name] for name in features if name in rules]
    for name in features[1:]:
        if not {features[0], name} <= {*rules} or _filled(rules[features[0]], group) != _filled(rules[name], group):
            raise refusal(
                f"tables.{table}.features",
                f"features {features[0]!r} and {name!r} share the rows of table {table!r}: give both the same mapping "
                "with equal options, or a table each; a table with dynamic ids has no other ids",
            )


def _check_rows(tables: Sequence[TableConfig], rule: Dynamic) -> None:
    first = tables[0]
    for table in tables:
        if table.rows < 4:
            raise refusal(f"tables.{table.name}.rows", f"{table.rows}: a table with dynamic ids has at least 4 rows")
        if rule.rows not in (None, table.rows):
            raise refusal(
                f"tables.{table.name}.rows",
                f"{table.rows}, but mapping.rows of its features is {rule.rows}; make them equal, or remove it",
            )
        if table.rows != first.rows:
            raise refusal(
                f"tables.{table.name}.rows",
                f"{table.rows}, but table {first.name!r} has {first.rows}: tables that read the same dynamic ids need "
                "equally many rows",
            )


def _check_table(table: TableConfig, sharding: ShardingConfig) -> None:
    constraint = sharding.constraints.get(table.name)
    if constraint is not None and "dense" in (constraint.compute_kernels or ()):
        raise refusal(
            f"sharding.constraints.{table.name}.compute_kernels",
            "a table with dynamic ids cannot be `dense`: optimizers.dense keeps no state by row that could be reset",
        )
    if table.vectors is not None:
        raise refusal(
            f"tables.{table.name}.init", "vectors from files are not yet possible with dynamic ids; remove it"
        )
