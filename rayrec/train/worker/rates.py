"""How fast each part of the model learns in a step: tables with rates of their own, and parameters that stand still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rayrec.optim import KeyedOptimizer
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build


class Rates:
    """Sets the learning rates of a step.

    Args:
        fused: optimizer of the tables, a group for each kernel.
        dense: parameters of the dense optimizer, by name.

    Raises:
        TrainError: the tables of one kernel would need several rates; a table with an optimizer of its own has a
            dense kernel.
    """

    def __init__(self, config: TrainConfig, fused: KeyedOptimizer, dense: Mapping[str, nn.Parameter]) -> None:
        self._config, self._fused = config, fused
        by_kernel = [[_table_of(name) for name in group["params"]] for group in fused.named_groups()]
        self._kernels = [self._kernel(tables) for tables in by_kernel]
        self._frozen = [(build.frozen(config, name), parameter) for name, parameter in dense.items()]
        names = [table.name for table in config.tables]
        left = {_table_of(name): parameter for name, parameter in dense.items() if _table_of(name) in names}
        for name, parameter in left.items():
            if name in config.optimizers.tables:
                raise TrainError(
                    f"optimizers.tables.{name}: the table has a dense kernel, which optimizers.dense trains; give it "
                    f"another one in sharding.constraints.{name}.compute_kernels"
                )
            self._frozen.append((build.frozen(config, name), parameter))
        self._frozen = [(until, parameter) for until, parameter in self._frozen if until]

    def _kernel(self, tables: list[str]) -> tuple[float, float]:
        """(its learning rate, steps that it stands still for)"""
        optimizers = self._config.optimizers
        found = {(optimizers.of_table(name).lr, build.frozen(self._config, name)) for name in tables}
        if len(found) > 1:
            raise TrainError(
                f"optimizers.freeze: tables {', '.join(tables)} share a kernel, so they stand still for equally many "
                "steps and have one lr; give them the same `until`, or optimizers of other settings"
            )
        return next(iter(found), (optimizers.sparse.lr, 0.0))

    def set(self, step: int, optimizer: torch.optim.Optimizer, dense: float, sparse: float) -> None:
        """Those of a step, counted from 0; `sparse` is that of tables without an own one."""
        for group in optimizer.param_groups:
            group["lr"] = dense
        default = self._config.optimizers.sparse.lr
        changed = False
        for group, (rate, until) in zip(self._fused.param_groups, self._kernels, strict=True):
            wanted = 0.0 if step < until else sparse if rate == default else rate * (sparse / default)
            changed = changed or group["lr"] != wanted
            group["lr"] = wanted
        if changed:
            self._fused.settings_changed()

    def hold(self, step: int) -> None:
        """Drops the gradients of what stands still in this step, so that its optimizer leaves it alone."""
        for until, parameter in self._frozen:
            if step < until:
                parameter.grad = None


def _table_of(name: str) -> str:
    """The table of a weight `path.table.weight`, or of a further shard `path.table.weight_1`."""
    parts: list[Any] = name.split(".")
    return parts[-2] if len(parts) > 1 else name
