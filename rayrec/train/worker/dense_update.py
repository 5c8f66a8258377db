"""What training keeps of the dense parameters beside their optimizer: gradients of several steps, averaged weights; and
the learning rates of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rayrec.optim import KeyedOptimizer
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build

GRADIENTS, WEIGHTS, SUMMED = "accumulated/", "trained/", "accumulated_steps"


class DenseUpdate:
    """The step of the dense optimizer: after each backward, or with the mean gradient of several.

    Checkpoints hold the averaged weights as the model's, which is what everyone but the trainer wants of them, and the
    weights that are trained beside them.

    Args:
        parameters: by name; tables with a dense kernel are not among them.
        steps: whose gradients are averaged.
        decay: of the running average of the weights; None: none is kept.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], steps: int = 1, decay: float | None = None) -> None:
        self._parameters, self._steps, self._decay = dict(parameters), steps, decay
        self._sums: dict[str, torch.Tensor] = {}
        self._summed = 0
        self._average = {} if decay is None else {name: p.detach().clone() for name, p in self._parameters.items()}

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the gradients of a step; steps the optimizer where they are complete."""
        if self._steps > 1 and not self._is_complete():
            return
        optimizer.step()
        if self._decay is not None:
            trained = [p.detach() for p in self._parameters.values()]
            torch._foreach_lerp_(list(self._average.values()), trained, 1 - self._decay)

    def _is_complete(self) -> bool:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                so_far = self._sums.get(name)
                self._sums[name] = parameter.grad.clone() if so_far is None else so_far.add_(parameter.grad)
        self._summed += 1
        if self._summed < self._steps:
            return False
        for name, total in self._sums.items():
            self._parameters[name].grad = total.div_(self._steps)
        self._sums, self._summed = {}, 0
        return True

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averaged weights, if there are any, while the body runs."""
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
        """For a checkpoint, the same on all ranks: weights as they are trained, where the model is saved with the
        averaged ones, and what gradients have been added up."""
        held = {f"{WEIGHTS}{name}": self._parameters[name].detach().clone() for name in self._average}
        held |= {f"{GRADIENTS}{name}": total.clone() for name, total in self._sums.items()}
        return held if not self._summed else {**held, SUMMED: torch.tensor(float(self._summed))}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint that the model was loaded from, with what `state` gave for it."""
        for name, parameter in self._parameters.items():
            if self._decay is not None:
                self._average[name] = parameter.detach().clone()
            if (trained := state.get(f"{WEIGHTS}{name}")) is not None:
                parameter.data.copy_(trained)
        summed = int(state.get(SUMMED, torch.zeros(())))
        if summed < self._steps:
            devices = {name: parameter.device for name, parameter in self._parameters.items()}
            sums = {name: state[f"{GRADIENTS}{name}"] for name in devices if f"{GRADIENTS}{name}" in state}
            self._summed, self._sums = summed, {name: total.to(devices[name]) for name, total in sums.items()}


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
