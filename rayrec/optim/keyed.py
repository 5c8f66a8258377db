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
        self.state: Any = state
        self.param_groups = [dict(group) for group in param_groups]
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    @property
    def state_names(self) -> list[str]:
        """The names in the state dict."""
        return list(self.params)

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
            ValueError: a parameter is unknown or missing, named, or another number of groups.
        """
        _check_fit(state_dict, self)
        for name, values in state_dict["state"].items():
            self._load_state(name, values)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.settings_changed()

    def _load_state(self, name: str, values: Mapping[str, Any]) -> None:
        mine = self.state.setdefault(self.params[name], {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                mine[key] = value
            elif isinstance(mine.get(key), torch.Tensor):
                mine[key].detach().copy_(value)
            else:
                mine[key] = value.detach().clone()  # not yet made: an optimizer makes its state in its first step

    def settings_changed(self) -> None:
        """To be called after a setting in `param_groups` was changed, for optimizers that keep a copy elsewhere."""

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


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer that does something before or after another one; all else is the other one's.

    Args:
        optimizer: the one inside.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self.params = optimizer.params
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @property
    def state_names(self) -> list[str]:
        return self._optimizer.state_names

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def settings_changed(self) -> None:
        self._optimizer.settings_changed()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return repr(self._optimizer)


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

    def settings_changed(self) -> None:
        for _, optimizer in self._optims:
            optimizer.settings_changed()

    @property
    def state_names(self) -> list[str]:
        return [f"{prefix}.{name}" if prefix else name for prefix, each in self._optims for name in each.state_names]

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' state dicts as one; names have their optimizer's prefix."""
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for prefix, optimizer in self._optims:
            dot, given = f"{prefix}." if prefix else "", optimizer.state_dict()
            state |= {dot + name: values for name, values in given["state"].items()}
            groups += [{**group, "params": [dot + n for n in group["params"]]} for group in given["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hands each optimizer its part of what `state_dict` wrote.

        Raises:
            ValueError: a parameter is unknown or missing, named, or another number of groups.
        """
        _check_fit(state_dict, self)
        groups = list(state_dict["param_groups"])
        for prefix, optimizer in self._optims:
            dot = f"{prefix}." if prefix else ""
            mine = {name: state_dict["state"][dot + name] for name in optimizer.state_names}
            count = len(optimizer.param_groups)
            optimizer.load_state_dict({"state": mine, "param_groups": groups[:count]})
            groups = groups[count:]

    def __repr__(self) -> str:
        return "\n".join(f"{prefix}: {optimizer!r}" for prefix, optimizer in self._optims)


def _check_fit(state_dict: Mapping[str, Any], optimizer: KeyedOptimizer) -> None:
    unlike = set(state_dict["state"]) ^ set(optimizer.state_names)
    if unlike:
        name = min(unlike)
        side = "the state to load" if name in state_dict["state"] else "this optimizer"
        raise ValueError(f"optimizer state does not fit: only {side} has a parameter {name!r}")
    there, here = len(state_dict["param_groups"]), len(optimizer.param_groups)
    if there != here:
        raise ValueError(f"optimizer state does not fit: it has {there} parameter groups, this optimizer {here}")
