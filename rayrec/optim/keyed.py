"""Optimizers with state by parameter name, and their combination.

State dicts have the form `{"state": {name: {key: value}}}` for parameters with state, and `"param_groups"` after
`save_param_groups(True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class KeyedOptimizer(Optimizer):
    """An optimizer over named parameters; its state dict has these names.

    Args:
        params: parameters (or other tensors) by name.
        state: for each parameter its state by name; shared with the caller, not copied.
        param_groups: as in `torch.optim`.

    Raises:
        ValueError: `state` has a key that is not in `params`.
    """

    _saves_groups = False

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[Any, Any],
        param_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        param_ids = {id(param) for param in params.values()}
        if any(id(param) not in param_ids for param in state):
            raise ValueError(f"the optimizer's state has a tensor that is not among its parameters {list(params)}")
        self.params = dict(params)
        self.state: Any = state
        self.param_groups = [dict(group) for group in param_groups]
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with parameters, for `pickle` and `copy`; torch's optimizers leave out what they do not know."""
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # -- state

    @property
    def state_names(self) -> list[str]:
        """The names that a state dict may have."""
        return list(self.params)

    def named_state(self) -> dict[str, dict[str, Any]]:
        """The state of each parameter that has one, by name."""
        return {name: dict(self.state[param]) for name, param in self.params.items() if self.state.get(param)}

    def named_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with the names of their parameters."""
        names = {id(param): name for name, param in self.params.items()}
        return [{**group, "params": sorted(names[id(p)] for p in group["params"])} for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {name: {key: value}}}` of the parameters that have a state; with `save_param_groups(True)` also
        `"param_groups": [{"params": [names], ...}]`."""
        if not self._saves_groups:
            return {"state": self.named_state()}
        return {"state": self.named_state(), "param_groups": self.named_groups()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a result of `state_dict` into this optimizer, which may be new; groups only after
        `save_param_groups(True)`.

        Raises:
            ValueError: a parameter is unknown, or has a state here and none there, named; another number of groups.
        """
        self._load_named_state(state_dict["state"])
        if self._saves_groups and "param_groups" in state_dict:
            self._load_groups(state_dict["param_groups"])
        self.post_load_state_dict()
        self.settings_changed()

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._check_names(state)
        for name, values in state.items():
            self._load_state(name, values)

    def _check_names(self, state: Mapping[str, Any]) -> None:
        unknown, missing = set(state) - set(self.state_names), set(self.named_state()) - set(state)
        if unknown or missing:
            name = min(unknown or missing)
            side = "the state to load" if unknown else "this optimizer"
            raise ValueError(f"optimizer state does not fit: only {side} has a parameter {name!r}")

    def _load_state(self, name: str, values: Mapping[str, Any]) -> None:
        mine = self.state.setdefault(self.params[name], {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                mine[key] = value
            elif isinstance(mine.get(key), torch.Tensor):
                mine[key].detach().copy_(value)
            else:  # not yet created: optimizers create state in their first step
                mine[key] = _as_state(key, value, self.params[name])

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"optimizer state does not fit: it has {len(groups)} parameter groups, "
                f"this optimizer {len(self.param_groups)}"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def post_load_state_dict(self) -> None:
        """Called after a state was loaded, for optimizers that keep a part of it elsewhere."""

    def save_param_groups(self, save: bool) -> None:
        """Sets whether state dicts contain the parameter groups."""
        self._saves_groups = save

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Creates all state by one step with zero gradients. You do not need this before loading a state.

        Step counts become 1, and weight decay acts. Parameters that are updated in backward have their state from the
        start.

        Args:
            sparse_grad_parameter_names: parameters that get a sparse gradient.
        """
        for name, param in self.params.items():
            if param.requires_grad and not hasattr(param, "_in_backward_optimizers"):
                sparse = name in (sparse_grad_parameter_names or ())
                param.grad = torch.zeros_like(param).to_sparse() if sparse else torch.zeros_like(param)
        self.step()

    # -- a step

    def settings_changed(self) -> None:
        """Call it after a change of a setting in `param_groups`, for optimizers that keep a copy elsewhere."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: parameters are given to the constructor."""
        raise NotImplementedError(f"{type(self).__name__}: give all parameters to the constructor")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies the update; a fused optimizer has done so in backward already."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any torch optimizer over named parameters.

    Args:
        params: parameters by name.
        optim_factory: makes the optimizer from a list of parameters, as in `lambda ps: torch.optim.Adam(ps, lr=1e-3)`.
        pass_params_dict: the factory gets the parameters by name.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        optim_factory: Callable[[Any], Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self._optimizer.state, [])
        self.param_groups = self._optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def set_optimizer_step(self, step: int) -> None:
        """Passes the step count to the wrapped optimizer, if it has this method."""
        call_if_defined(self._optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Passes the settings to the wrapped optimizer, if it has this method."""
        call_if_defined(self._optimizer, "update_hyper_parameters", params_dict)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one.

    Args:
        optims: optimizers, or (prefix, optimizer) pairs; a prefix comes before its parameters' names.

    Raises:
        ValueError: two optimizers hold a parameter of the same name.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [("", item) if isinstance(item, KeyedOptimizer) else item for item in optims]
        self.defaults = {}
        names: set[str] = set()
        for name in (
            name for prefix, keyed_optimizer in self._optims for name in _prefixed(prefix, keyed_optimizer.params)
        ):
            if name in names:
                raise ValueError(f"two optimizers hold a parameter {name!r}")
            names.add(name)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """`opt_key.name`; the name alone where the key is empty."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        return self._optims

    @property
    def params(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {
            name: p
            for prefix, keyed_optimizer in self._optims
            for name, p in _prefixed(prefix, keyed_optimizer.params).items()
        }

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

    def set_optimizer_step(self, step: int) -> None:
        """Passes the step count to the optimizers that have this method."""
        for _, optimizer in self._optims:
            call_if_defined(optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Passes the settings to the optimizers that have this method."""
        for _, optimizer in self._optims:
            call_if_defined(optimizer, "update_hyper_parameters", params_dict)

    def settings_changed(self) -> None:
        for _, optimizer in self._optims:
            optimizer.settings_changed()

    @property
    def state_names(self) -> list[str]:
        return [
            self.prepend_opt_key(name, prefix)
            for prefix, keyed_optimizer in self._optims
            for name in keyed_optimizer.state_names
        ]

    def named_state(self) -> dict[str, dict[str, Any]]:
        return {
            name: s
            for prefix, keyed_optimizer in self._optims
            for name, s in _prefixed(prefix, keyed_optimizer.named_state()).items()
        }

    def named_groups(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self.prepend_opt_key(name, prefix) for name in group["params"]]}
            for prefix, optimizer in self._optims
            for group in optimizer.named_groups()
        ]

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._check_names(state)
        for prefix, optimizer in self._optims:
            names = {self.prepend_opt_key(name, prefix): name for name in optimizer.state_names}
            optimizer._load_named_state({name: state[full] for full, name in names.items() if full in state})

    def post_load_state_dict(self) -> None:
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        for _, optimizer in self._optims:
            optimizer.save_param_groups(save)

    def __repr__(self) -> str:
        return "\n".join(f"{prefix}: {optimizer!r}" for prefix, optimizer in self._optims)


def call_if_defined(optimizer: Optimizer, method: str, *args: Any) -> None:
    """Calls a method of an optimizer, if it has one of this name."""
    if (call := getattr(optimizer, method, None)) is not None:
        call(*args)


def _prefixed(prefix: str, items: Mapping[str, Any]) -> dict[str, Any]:
    return {CombinedOptimizer.prepend_opt_key(name, prefix): item for name, item in items.items()}


class OptimizerWrapper(CombinedOptimizer):
    """Base class of wrappers: acts before or after the step of another optimizer, and keeps its names.

    Args:
        optimizer: the wrapped optimizer.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__([optimizer])

    @property
    def params(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._optimizer.params

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._optimizer._load_named_state(state)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def _as_state(key: str, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A copy in the parameter's memory and number format, as `torch.optim.Optimizer.load_state_dict` makes it."""
    if key == "step" or not param.is_floating_point():  # step counts may stay on the CPU
        return value.detach().clone()
    return value.detach().to(param, copy=True)
