"""Applies functions to a lazy module after its first forward, which creates the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

Function = Callable[[nn.Module], None]


def lazy_apply(module: nn.Module, fn: Function) -> nn.Module:
    """Applies `fn` to the module and all submodules after the first forward. Several functions run in order of calls.

    Returns:
        The module.
    """
    pending: list[Function] | None = getattr(module, "_lazy_functions", None)
    if pending is not None:
        pending.append(fn)
        return module
    module._lazy_functions = [fn]  # type: ignore[assignment]

    def after_forward(called: nn.Module, inputs: Any, output: Any) -> None:
        hook.remove()
        functions: Any = called._lazy_functions
        del called._lazy_functions
        for function in functions:
            called.apply(function)

    hook = module.register_forward_hook(after_forward)
    return module


class LazyModuleExtensionMixin(LazyModuleMixin):
    """torch's `LazyModuleMixin` with support of keyword arguments.

    `initialize_parameters` gets the arguments of the forward.
    """

    def apply(self, fn: Function) -> nn.Module:
        """See `torch.nn.Module.apply`.

        Raises:
            RuntimeError: before the first forward; use `lazy_apply`.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(f"{type(self).__name__} has no parameters before its first forward; use lazy_apply")
        return super().apply(fn)  # type: ignore[misc]
