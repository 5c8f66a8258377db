"""The optimizer inside backward as a `torch.optim` optimizer: learning rates to schedule, and state to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayrec.distributed.collections.sharded_table import LocalShard, ShardedTable
from rayrec.distributed.kernel.interface import Kernel, updating
from rayrec.optim import CombinedOptimizer, KeyedOptimizer

STEP = "step"  # torch's name for the number of updates in an optimizer's state


class EmbeddingFusedOptimizer(KeyedOptimizer):
    """The optimizers of a collection's kernels, one parameter group each. Backward updates the rows; `step` and
    `zero_grad` pass the learning rates to the kernels.

    The state dict is sharded like the tables: `{"prefix.table.weight": {"table.momentum1": ShardedTensor}}`, with an
    entry for each table with a shard on this rank. torch.distributed.checkpoint can save and load it. Tables of an
    optimizer with bias correction (Adam, LAMB) also have `"table.step"`, the number of updates so far.

    Args:
        kernels: kernels that update inside backward.
        tables: tables of the collection, by name; a kernel's tables and a table's local shards have the same order.
        prefix: prefix of the parameters' names.
    """

    def __init__(self, kernels: Sequence[Kernel], tables: Mapping[str, ShardedTable], prefix: str) -> None:
        self._kernels = list(kernels)
        shards: dict[str, list[LocalShard]] = {}
        params: dict[str, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        groups = []
        for kernel in kernels:
            group_params = []
            for name in _names(kernel):
                table_shards = shards.setdefault(name, [])
                shard = tables[name].local[len(table_shards)]
                suffix = f"_{len(table_shards)}" if table_shards else ""
                table_shards.append(shard)
                params[f"{prefix}.{name}.weight{suffix}"] = shard.parameter
                state[shard.parameter] = {f"{name}.{key}": value for key, value in shard.state.items()}
                group_params.append(shard.parameter)
            groups.append({"params": group_params, "lr": kernel.learning_rate})
        self._steps = [  # (kernel, key of the step count by parameter name)
            (kernel, {f"{prefix}.{name}.weight": f"{name}.{STEP}" for name in _names(kernel)})
            for kernel in kernels
            if kernel.tables[0].update.rule.corrects_bias
        ]
        self._tables = {f"{prefix}.{name}.weight": tables[name] for name in shards}
        super().__init__(params, state, groups)
        for param in params.values():
            param._in_backward_optimizers = [self]  # type: ignore[attr-defined]

    @property
    def state_names(self) -> list[str]:
        return list(self._tables)

    def named_state(self) -> dict[str, dict[str, Any]]:
        for kernel in self._kernels:
            kernel.states()  # writes rows in a device cache back to the shards' memory
        named = {
            name: {f"{table.config.name}.{key}": value for key, value in table.optimizer_state().items()}
            for name, table in self._tables.items()
        }
        for kernel, keys in self._steps:
            for name, key in keys.items():
                named[name][key] = torch.tensor(kernel.iteration)
        return {name: state for name, state in named.items() if state}

    def named_groups(self) -> list[dict[str, Any]]:
        names = {id(shard.parameter): name for name, table in self._tables.items() for shard in table.local}
        return [
            {**group, "params": sorted({names[id(param)] for param in group["params"]})} for group in self.param_groups
        ]

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super()._load_named_state(state)
        for kernel, keys in self._steps:
            steps = [int(state[name][key]) for name, key in keys.items() if key in state.get(name, {})]
            if steps:  # TorchRec's state has no step counts
                kernel.iteration = max(steps)

    def _load_state(self, name: str, values: Mapping[str, Any]) -> None:
        table = self._tables[name]
        table.load_optimizer_state({key.removeprefix(f"{table.config.name}."): value for key, value in values.items()})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sets the learning rate of the next backward. The rows are up to date already."""
        self.settings_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.settings_changed()

    def settings_changed(self) -> None:
        """Passes the learning rates to the kernels."""
        for kernel, group in zip(self._kernels, self.param_groups, strict=True):
            if group["lr"] != kernel.learning_rate:
                kernel.learning_rate = float(group["lr"])


def _names(kernel: Kernel) -> list[str]:
    return [table.config.name for table in kernel.tables]


def fused_optimizer_of(kernels: Sequence[Kernel], tables: Mapping[str, ShardedTable], prefix: str) -> CombinedOptimizer:
    """The optimizer of a collection's kernels that update inside backward."""
    fused = updating(kernels)
    return CombinedOptimizer([EmbeddingFusedOptimizer(fused, tables, prefix)] if fused else [])
