"""`nn.Linear` whose products in training are oneDNN's on AMD processors, where torch's MKL takes twice the time.

A product of oneDNN here is a plain one of float32: results differ from torch's by rounding alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIN_PRODUCTS = 1 << 20  # of a layer and batch: with less there is nothing to gain


class Linear(nn.Linear):
    """`nn.Linear`; what is not a training step on a CPU, in float32, without a tracer, is left to torch as it is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, by oneDNN where `Linear` is."""
    if type(given) is torch.Tensor and _in_training(given, weight) and _mkl_is_slow():
        result: torch.Tensor = _Linear.apply(given, weight, bias)
        return result
    return nn.functional.linear(given, weight, bias)


def _in_training(given: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and given.device.type == weight.device.type == "cpu"
        and given.dtype == weight.dtype == torch.float32
        and given.dim() == 2
        and given.numel() * weight.shape[0] >= MIN_PRODUCTS
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _times(inputs.contiguous(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs, weight), grad = ctx.saved_tensors, grads[0].contiguous()
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        inputs = inputs.contiguous()
        narrow = inputs.shape[1] < grad.shape[1]  # oneDNN copies the left one of two transposed factors: the smaller
        return (
            _times(grad, weight.t()) if of_inputs else None,
            (_times(inputs.t(), grad.t()).t() if narrow else _times(grad.t(), inputs.t())) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _times(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`left @ right.T + bias`."""
    if torch.is_grad_enabled():  # a backward that is itself differentiated: oneDNN's operator has no gradient
        return nn.functional.linear(left, right, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


@cache
def _mkl_is_slow() -> bool:
    """Whether torch would ask MKL on an AMD processor, and has oneDNN."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor.exists()
        and "AuthenticAMD" in processor.read_text()
    )
