"""What training keeps of the dense parameters beside their optimizer: gradients of several steps, averaged weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

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
