"""Optimizers whose state is kept by parameter name, and their combination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class KeyedOptimizer(Optimizer):
    """An optimizer that knows its parameters by name, so that its state dict does too.

    Args:
        params: parameters (or other tensors) by name.
        state: for each parameter its state by name; shared with the caller, not copied.
        param_groups: as in `torch.optim`.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[Any, Any],
        param_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.params = dict(params)
        self.state = state  # type: ignore[assignment]
        self.param_groups = [dict(group) for group in param_groups]
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks = {}  # type: ignore[assignment]
        self._optimizer_step_post_hooks = {}  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}`."""
        names = {id(param): name for name, param in self.params.items()}
        return {
            "state": {name: dict(self.state.get(param, {})) for name, param in self.params.items()},
            "param_groups": [
                {**group, "params": sorted(names[id(p)] for p in group["params"])} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies what `state_dict` wrote into this optimizer's state.

        Raises:
            ValueError: a parameter is unknown or missing, named.
        """
        unknown = set(state_dict["state"]) ^ set(self.params)
        if unknown:
            raise ValueError(f"optimizer state does not fit: {sorted(unknown)} is on one side only")
        for name, values in state_dict["state"].items():
            mine = self.state.setdefault(self.params[name], {})  # type: ignore[attr-defined]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(mine.get(key), torch.Tensor):
                    mine[key].detach().copy_(value)
                else:
                    mine[key] = value
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies the update; a fused optimizer has done so in backward already."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params.values():
            if param.grad is None:
                continue
            if set_to_none:
                param.grad = None
            else:
                param.grad.zero_()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for place, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {place}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group) if key != "params"]
        return "\n".join([*lines, ")"])


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any torch optimizer over named parameters.

    Args:
        params: parameters by name.
        factory: makes the optimizer from a list of parameters, as in `lambda ps: torch.optim.Adam(ps, lr=1e-3)`.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], factory: Callable[[list[torch.Tensor]], Optimizer]) -> None:
        self._optimizer = factory(list(params.values()))
        super().__init__(params, self._optimizer.state, [])
        self.param_groups = self._optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers driven as one.

    Args:
        optims: optimizers, or (prefix, optimizer) pairs; a prefix comes before its parameters' names.

    Raises:
        ValueError: two optimizers hold a parameter of the same name.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [("", item) if isinstance(item, KeyedOptimizer) else item for item in optims]
        params: dict[str, torch.Tensor] = {}
        for prefix, optimizer in self._optims:
            for name, param in optimizer.params.items():
                full = f"{prefix}.{name}" if prefix else name
                if full in params:
                    raise ValueError(f"two optimizers hold a parameter {full!r}")
                params[full] = param
        self.params = params
        self.defaults = {}

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        return self._optims

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for _, optimizer in self._optims for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {param: state for _, optimizer in self._optims for param, state in optimizer.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, optimizer in self._optims:
            optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        for prefix, optimizer in self._optims:
            dot = f"{prefix}." if prefix else ""
            mine = {name: state_dict["state"][dot + name] for name in optimizer.params}
            count = len(optimizer.param_groups)
            optimizer.load_state_dict({"state": mine, "param_groups": groups[:count]})
            groups = groups[count:]

    def __repr__(self) -> str:
        return "\n".join(f"{prefix}: {optimizer!r}" for prefix, optimizer in self._optims)
