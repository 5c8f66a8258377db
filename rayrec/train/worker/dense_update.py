"""The optimizer step of the dense parameters, their averaged weights, and the learning rates of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from rayrec.optim import KeyedOptimizer
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build

WEIGHTS = "trained/"


class DenseUpdate:
    """Steps the dense optimizer, and keeps a running average of the dense parameters if one is configured.

    A checkpoint stores the average as the model's weights, for evaluation and export, and the trained weights as
    additional tensors, for resuming.

    Args:
        parameters: dense parameters by name, without tables.
        decay: decay of the running average; None: no average.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float | None = None) -> None:
        self._parameters, self._decay = dict(parameters), decay
        self._average = {} if decay is None else {name: p.detach().clone() for name, p in self._parameters.items()}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer and update the average."""
        optimizer.step()
        if self._decay is not None:
            trained = [p.detach() for p in self._parameters.values()]
            torch._foreach_lerp_(list(self._average.values()), trained, 1 - self._decay)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights in the model while the body runs. Does nothing without an average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, average in self._average.items():
            parameter = self._parameters[name]
            parameter.data, self._average[name] = average, parameter.data

    def state(self) -> dict[str, torch.Tensor]:
        """The trained weights, which a checkpoint stores besides the averaged ones; the same on all ranks. Empty
        without an average."""
        return {f"{WEIGHTS}{name}": self._parameters[name].detach().clone() for name in self._average}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore from the additional tensors of the checkpoint that the model was loaded from."""
        for name, parameter in self._parameters.items():
            if self._decay is not None:
                self._average[name] = parameter.detach().clone()
            if (trained := state.get(f"{WEIGHTS}{name}")) is not None:
                parameter.data.copy_(trained)


class Rates:
    """Sets the learning rates of a step.

    Args:
        fused: optimizer of the tables, with a parameter group for each kernel.
        dense: parameters of the dense optimizer, by name.

    Raises:
        TrainError: tables of one kernel need different rates, or a table with its own optimizer has a dense kernel.
    """

    def __init__(self, config: TrainConfig, fused: KeyedOptimizer, dense: Mapping[str, nn.Parameter]) -> None:
        self._config, self._fused = config, fused
        by_kernel = [[_table_of(name) for name in group["params"]] for group in fused.named_groups()]
        self._kernels = [self._kernel(tables) for tables in by_kernel]
        frozen = [(build.frozen(config, name), parameter) for name, parameter in dense.items()]
        names = {table.name for table in config.tables}
        for name, parameter in dense.items():
            table = _table_of(name)
            if table not in names:
                continue
            if table in config.optimizers.tables:
                raise TrainError(
                    f"optimizers.tables.{table}: the table has a dense kernel, which optimizers.dense trains; choose "
                    f"another kernel in sharding.constraints.{table}.compute_kernels"
                )
            frozen.append((build.frozen(config, table), parameter))
        self._frozen = [(until, parameter) for until, parameter in frozen if until]

    def _kernel(self, tables: list[str]) -> tuple[float, float]:
        """(learning rate, steps for which it is frozen) of the tables of a kernel."""
        optimizers = self._config.optimizers
        settings = {(optimizers.of_table(name).lr, build.frozen(self._config, name)) for name in tables}
        if len(settings) > 1:
            raise TrainError(
                f"optimizers.freeze: tables {', '.join(tables)} share a kernel, so they need the same lr and the same "
                "number of frozen steps; give them the same `until`, or optimizers with other settings"
            )
        return next(iter(settings), (optimizers.sparse.lr, 0.0))

    def set(self, step: int, optimizer: torch.optim.Optimizer, dense: float, sparse: float) -> None:
        """Set the learning rates of a step.

        Args:
            step: counted from 0.
            dense: rate of the dense optimizer.
            sparse: rate of tables without a separate rate. The schedule scales separate rates by the same factor.
        """
        for group in optimizer.param_groups:
            group["lr"] = dense
        default = self._config.optimizers.sparse.lr
        changed = False
        for group, (rate, until) in zip(self._fused.param_groups, self._kernels, strict=True):
            lr = 0.0 if step < until else sparse if rate == default else rate * (sparse / default)
            changed = changed or group["lr"] != lr
            group["lr"] = lr
        if changed:
            self._fused.settings_changed()

    def drop_frozen_gradients(self, step: int) -> None:
        """Set the gradients of parameters that are frozen in this step to None, so that the optimizer skips them."""
        for until, parameter in self._frozen:
            if step < until:
                parameter.grad = None


def _table_of(name: str) -> str:
    """The table of a weight `path.table.weight`, or of a further shard `path.table.weight_1`."""
    components = name.split(".")
    return components[-2] if len(components) > 1 else name
