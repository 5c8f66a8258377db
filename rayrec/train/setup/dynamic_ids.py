"""The maps of a config's tables with dynamic ids."""

from __future__ import annotations

from rayrec.data.mapping.rules import Dynamic
from rayrec.dynamic_ids import DynamicIds, Evict, SharedMap, connected
from rayrec.train.config.train_config import TrainConfig


def shared_maps(config: TrainConfig) -> list[SharedMap]:
    """One map for each group of tables that are connected by features with dynamic ids."""
    rules, rows = config.data_schema.dynamic, {table.name: table.rows for table in config.tables}
    groups = connected([(table.name, table.features) for table in config.tables], rules)
    return [
        SharedMap(
            name=tables[0],
            tables=tuple(tables),
            features=tuple(features),
            config=_of(rules[features[0]], rows[tables[0]], config.trainer.seed),
            timed=rules[features[0]].time is not None,
            drops=rules[features[0]].unseen == "zero",
        )
        for tables, features in groups
    ]


def _of(rule: Dynamic, rows: int, seed: int) -> DynamicIds:
    return DynamicIds(
        rows=rows,
        evict=Evict[rule.evict.upper()],
        half_life_s=rule.half_life,
        ttl_s=rule.ttl,
        min_count=rule.admit.min_count,
        probability=rule.admit.probability,
        fallback=rule.fallback,
        seed=seed,
    )
