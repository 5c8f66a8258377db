"""A local optimizer for every step, and a global optimizer that synchronizes groups of ranks at intervals, as in DiLoCo
(Douillard et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rayrec.optim.keyed import KeyedOptimizer, call_if_defined

LOCAL, GLOBAL = "semi_sync_local_", "semi_sync_global_"
LOCAL_COUNT, GLOBAL_COUNT = "__semisync_local_step_counter__", "__semisync_global_step_counter__"


class SemisyncOptimizer(KeyedOptimizer):
    """Steps with `optimizer` every time, and with `global_optimizer` every `num_local_steps` steps.

    The state of a parameter contains the states of both, with prefixed keys; parameters of the global optimizer also
    have two counters.

    Args:
        global_params: the parameters of the global step; see torch.optim.
        optimizer: the local optimizer.
        global_optimizer: a KeyedOptimizerWrapper of an optimizer with `global_step(local_step_counter, closure)`.
        num_local_steps: local steps between two global steps.
        semi_sync_worker_shard_group, offload_global_model, non_blocking: ignored.

    Raises:
        ValueError: no global parameters; an optimizer without `global_step`; or the two optimizers have different
            tensors with the same name.
    """

    def __init__(
        self,
        global_params: Iterable[Any],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: dist.ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        if not list(global_params):
            raise ValueError("global_params is empty; pass the parameters of the global step")
        self._local, self._global = optimizer, global_optimizer
        self._step_globally = getattr(getattr(global_optimizer, "_optimizer", None), "global_step", None)
        if self._step_globally is None:
            raise ValueError(
                "global_optimizer: wrap an optimizer with global_step(local_step_counter, closure) in a "
                "KeyedOptimizerWrapper"
            )
        for name, param in global_optimizer.params.items():
            if optimizer.params.get(name, param) is not param:
                raise ValueError(f"parameter {name!r}: the local and the global optimizer have different tensors")
        self._num_local_steps = num_local_steps
        self._local_count, self._global_count = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        self.defaults = {}

    @property
    def params(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        counts = {GLOBAL_COUNT: self._global_count, LOCAL_COUNT: self._local_count}
        return {**self._local.params, **self._global.params, **counts}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [*self._local.param_groups, *self._global.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        named = self.named_state()
        return {param: named[name] for name, param in self.params.items() if name in named}

    @property
    def state_names(self) -> list[str]:
        return list({**self._local.params, **self._global.params})

    def named_state(self) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {}
        for prefix, optimizer in ((LOCAL, self._local), (GLOBAL, self._global)):
            for name, state in optimizer.named_state().items():
                out.setdefault(name, {}).update({f"{prefix}{key}": value for key, value in state.items()})
                if optimizer is self._global:
                    out[name] |= {GLOBAL_COUNT: self._global_count, LOCAL_COUNT: self._local_count}
        return out

    def named_groups(self) -> list[dict[str, Any]]:
        return [*self._local.named_groups(), *self._global.named_groups()]

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """
        Raises:
            ValueError: an unknown parameter, or a state without the two counters.
        """
        self._check_names(state)
        counted = next((values for values in state.values() if {LOCAL_COUNT, GLOBAL_COUNT} <= values.keys()), None)
        if counted is None:
            raise ValueError(f"optimizer state does not fit: no parameter has {LOCAL_COUNT} and {GLOBAL_COUNT}")
        self._local_count.copy_(counted[LOCAL_COUNT])
        self._global_count.copy_(counted[GLOBAL_COUNT])
        for prefix, optimizer in ((LOCAL, self._local), (GLOBAL, self._global)):
            states = {
                name: {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
                for name, values in state.items()
            }
            optimizer._load_named_state({name: values for name, values in states.items() if values})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._local_count += 1
        self._local.step(closure)
        if int(self._local_count) % self._num_local_steps == 0:
            self._global_count += 1
            self._global.zero_grad()
            with torch.no_grad():
                self._step_globally(self._local_count, closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._local.zero_grad(set_to_none)
        self._global.zero_grad(set_to_none)

    def settings_changed(self) -> None:
        self._local.settings_changed()
        self._global.settings_changed()

    def post_load_state_dict(self) -> None:
        self._local.post_load_state_dict()
        self._global.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        self._local.save_param_groups(save)
        self._global.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Passed on to the optimizers that have it."""
        for optimizer in (self._local, self._global):
            call_if_defined(optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Passed on to the optimizers that have it."""
        for optimizer in (self._local, self._global):
            call_if_defined(optimizer, "update_hyper_parameters", params_dict)

    def __repr__(self) -> str:
        return f"semi_sync_local_optim: {self._local!r}, semi_sync_global_optim: {self._global!r}"
