"""Sparse tensors in models that torch.fx traces."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

from torch import fx


class Traceable(ABCMeta):
    """Of a class whose call with a proxy as an argument is a node of the graph that is traced."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, fx.Proxy):
                return given.tracer.create_proxy("call_function", cls, args, kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's, for `inspect.signature` and help."""
        made = inspect.signature(cls.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:])
