"""Functions that are applied to a module after its first forward has created its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

Function = Callable[[nn.Module], None]


def lazy_apply(module: nn.Module, fn: Function) -> nn.Module:
    """Applies `fn` to the module and all its submodules after the first forward; several, in the order they came.

    Returns:
        The module.
    """
    waiting: list[Function] | None = getattr(module, "_lazy_functions", None)
    if waiting is not None:
        waiting.append(fn)
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
    """torch's mixin for modules that create parameters in the first forward, with keyword arguments too.

    `initialize_parameters` is called with the forward's arguments.
    """

    def apply(self, fn: Function) -> nn.Module:
        """As of any module.

        Raises:
            RuntimeError: before the first forward; `lazy_apply` waits for it.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(
                f"{type(self).__name__} has no parameters before its first forward; use lazy_apply, which waits for it"
            )
        return super().apply(fn)  # type: ignore[misc]
