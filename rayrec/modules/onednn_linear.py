"""`nn.Linear` that trains with oneDNN's matrix products on AMD processors, where torch's MKL needs twice the time.

oneDNN computes in float32, so results differ from torch's by rounding only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIN_PRODUCTS = 1 << 20  # multiplications per layer and batch; oneDNN does not pay off for fewer


class Linear(nn.Linear):
    """`nn.Linear` with oneDNN in float32 training steps on a CPU; otherwise, and under tracers, torch's own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` as `Linear` computes it."""
    if type(inputs) is torch.Tensor and _in_training(inputs, weight) and _mkl_is_slow():
        result: torch.Tensor = _Linear.apply(inputs, weight, bias)
        return result
    return nn.functional.linear(inputs, weight, bias)


def _in_training(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and inputs.device.type == weight.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.dim() == 2
        and inputs.numel() * weight.shape[0] >= MIN_PRODUCTS
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
        # oneDNN copies the left one of two transposed factors, so the smaller factor comes first.
        narrow = inputs.shape[1] < grad.shape[1]
        return (
            _times(grad, weight.t()) if of_inputs else None,
            (_times(inputs.t(), grad.t()).t() if narrow else _times(grad.t(), inputs.t())) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _times(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`left @ right.T + bias`."""
    if torch.is_grad_enabled():  # in a differentiated backward: oneDNN's operator has no gradient
        return nn.functional.linear(left, right, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


@cache
def _mkl_is_slow() -> bool:
    """Whether torch would use MKL on an AMD processor, and has oneDNN."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor.exists()
        and "AuthenticAMD" in processor.read_text()
    )
