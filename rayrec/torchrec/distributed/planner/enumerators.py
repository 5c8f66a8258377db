"""The sharding options of rayrec's planner as TorchRec's `ShardingOption`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.search.options import Option, Unit, host_sizes, options
from rayrec.distributed.planner.tables.from_model import find_tables, planner_tables
from rayrec.distributed.planner.tables.table import Table
from rayrec.torchrec.distributed.parameter_sharding import CacheParams
from rayrec.torchrec.distributed.planner.bases import Enumerator, ShardEstimator
from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.parts import PARTITION_BY, Perf, Proposal, Shard, ShardingOption, Storage
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingEnumerator", "Enumerator"]

OVER_ROWS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


class EmbeddingEnumerator(Enumerator):
    """Lists every option of rayrec's planner with its costs.

    Args:
        topology: the cluster.
        batch_size: examples per rank and step.
        constraints: constraints by table name.
        estimator: overwrites the costs.
        use_exact_enumerate_order: ignored.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self.topology, self.batch_size, self.constraints = topology, batch_size, dict(constraints or {})
        self._estimators = estimator if isinstance(estimator, list) else [estimator] if estimator else []
        self.last_stored_search_space: Proposal | None = None

    def enumerate(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Proposal:
        """Return all options of all tables, in the model's order.

        Raises:
            ValueError: an invalid constraint.
        """
        model_tables = find_tables(module, sharders, self.topology.compute_device)
        tables = planner_tables(model_tables, self.topology, self.constraints, self.batch_size)
        space = []
        for number, (table, model_table) in enumerate(zip(tables, model_tables, strict=True)):
            collection = module.get_submodule(model_table.path)
            names = {id(weight): name for name, weight in collection.named_parameters()}
            weight = next(w for w in collection.parameters() if f"{table.name}.weight" in names[id(w)])
            for option in options(number, table, self.topology, off_device=True):
                space.append(self._option(option, table, collection, weight))
        self.populate_estimates(space)
        self.last_stored_search_space = space
        return space

    def populate_estimates(self, sharding_options: Proposal) -> None:
        for estimator in self._estimators:
            estimator.estimate(sharding_options, {})

    def _option(self, option: Option, table: Table, collection: nn.Module, weight: Any) -> ShardingOption:
        constraint = self.constraints.get(table.name)
        factors = list(constraint.pooling_factors) if constraint and constraint.pooling_factors else [1.0]
        cached = option.kernel == "fused_uvm_caching"
        return ShardingOption(
            name=table.name,
            tensor=weight,
            module=(table.path, collection),
            input_lengths=factors,
            batch_size=self.batch_size,
            sharding_type=option.sharding_type,
            partition_by=PARTITION_BY[ShardingType(option.sharding_type)].value,
            compute_kernel=option.kernel,
            shards=[shard for unit in option.units for shard in self._shards(option, unit, table)],
            cache_params=CacheParams(load_factor=option.cache_load_factor) if cached else None,
            is_pooled=table.pooled,
        )

    def _shards(self, option: Option, unit: Unit, table: Table) -> Iterator[Shard]:
        """Yield the rectangles of a unit, in rank order."""
        kind, topology = ShardingType(option.sharding_type), self.topology
        size = len(host_sizes(topology)) - 1  # the largest hosts
        milliseconds, lookup = unit.seconds[size] * 1000, unit.lookup[size] * 1000
        count = topology.local_world_size if kind in OVER_ROWS[1:] else topology.world_size
        step = -(-table.rows // count)
        edges = [min(index * step, table.rows) for index in range(count + 1)]
        if kind is ShardingType.DATA_PARALLEL:
            spans = [(0, table.rows)] * count
        else:
            spans = list(pairwise(edges)) if kind in OVER_ROWS else [(0, table.rows)]
        for start, stop in spans:
            share = (stop - start) / max(spans[0][1] - spans[0][0], 1)
            device, host = int(unit.device_bytes[size] * share), int(unit.host_bytes[size] * share)
            on_cpu = topology.compute_device == "cpu"
            yield Shard(
                size=[stop - start, unit.cols.size],
                offset=[start, unit.cols.start],
                storage=Storage(0, device + host) if on_cpu else Storage(device, host),
                perf=Perf(lookup * share, 0.0, (milliseconds - lookup) * share, 0.0),
            )
