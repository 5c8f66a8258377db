"""Gates and experts for several tasks: shared bottom, MMoE (Ma et al. 2018) and PLE (Tang et al. 2020).

Shapes: B samples, T tasks, E experts, H the width of an expert's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.activation import LayerStyle
from rayrec.modules.onednn_linear import Linear, linear

PLAIN = LayerStyle()


class ParallelMLPs(nn.Module):
    """E networks of one shape, computed together, with an activation after every layer (except the last if `logits`).

    Args:
        count: E.
        in_size: Width of the input.
        layer_sizes: Width of each layer's output.
        logits: Whether the last layer has no activation and dropout.
        style: Activation, normalization and dropout.
    """

    def __init__(
        self,
        count: int,
        in_size: int,
        layer_sizes: Sequence[int],
        logits: bool = False,
        style: LayerStyle = PLAIN,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        widths = [in_size, *layer_sizes]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(count, a, b, device=device)) for a, b in zip(widths, layer_sizes, strict=False)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(count, 1, b, device=device)) for b in layer_sizes)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
        self.logits, self.dropout = logits, style.dropout
        active = list(layer_sizes)[:-1] if logits else layer_sizes
        self.activations = nn.ModuleList(style.module((count, width), device) for width in active)

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[B, E, H]` from each network's input `[B, in_size]`. Consecutive networks with one input share a product."""
        x_BEH = _products(inputs, self.weights[0], self.biases[0])
        for weight, bias, activation in zip(self.weights[1:], self.biases[1:], self.activations, strict=False):
            x_BEH = self._dropped(activation(x_BEH))
            if x_BEH.device.type == "cpu":
                x_BEH = _products(x_BEH.unbind(1), weight, bias)
            else:  # one kernel for all networks
                x_BEH = torch.baddbmm(bias, x_BEH.transpose(0, 1), weight).transpose(0, 1)
        return x_BEH if self.logits else self._dropped(self.activations[-1](x_BEH))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


def _products(inputs: Sequence[torch.Tensor], weight_EIO: torch.Tensor, bias_E1O: torch.Tensor) -> torch.Tensor:
    """Each network's input times its weights, `[B, E, O]`, with one product per run of equal inputs."""
    weights, biases = weight_EIO.mT, bias_E1O[:, 0]
    products = [
        linear(x_BI, weights[start:end].flatten(0, 1), biases[start:end].flatten()).unflatten(1, (end - start, -1))
        for x_BI, start, end in _runs(inputs)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _runs(inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int, int]]:
    """Runs of equal inputs: the tensor, the first index and the index after the last."""
    starts = [index for index, tensor in enumerate(inputs) if index == 0 or tensor is not inputs[index - 1]]
    return [(inputs[start], start, end) for start, end in pairwise([*starts, len(inputs)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of a level of experts.

    Args:
        tasks: T.
        own: Experts of each task alone; 0 for MMoE and shared bottom.
        shared: Experts of all tasks; 1 with `own` 0 is a shared bottom.
        layers: Layer widths of every expert.
    """

    tasks: int
    own: int
    shared: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.own < 0 or self.shared < 1 or not self.layers:
            raise ValueError(f"{self}: at least one task, one shared expert and one layer are needed, and own >= 0")


class GatedExperts(nn.Module):
    """One level. A task's gate mixes its own and the shared experts; the shared gate, if any, mixes all experts.

    Args:
        in_size: Width of each input.
        sizes: Sizes of the level.
        hands_on: Whether another level follows, so that the output needs a shared mix.
    """

    def __init__(
        self,
        in_size: int,
        sizes: ExpertSizes,
        hands_on: bool = False,
        style: LayerStyle = PLAIN,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.num_experts = sizes.tasks * sizes.own + sizes.shared
        self.experts = ParallelMLPs(self.num_experts, in_size, sizes.layers, style=style, device=device)
        reach = [sizes.own + sizes.shared] * sizes.tasks + [self.num_experts] * hands_on
        self.gates = nn.ModuleList(Linear(in_size, count, bias=False, device=device) for count in reach)

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tasks' inputs and the shared input, `[B, D]` each, to `[B, T, H]`, or `[B, T + 1, H]` with `hands_on`."""
        sizes, num_own = self.sizes, self.sizes.tasks * self.sizes.own
        of_experts = [task_input for task_input in inputs[:-1] for _ in range(sizes.own)] + [inputs[-1]] * sizes.shared
        gates: list[torch.Tensor] = list(self.gates.parameters())
        logits, shares = list[torch.Tensor](), list[torch.Tensor]()
        for x_BD, start, end in _runs(inputs[: len(gates)]):
            wide = linear(x_BD, torch.cat(gates[start:end]), None)
            logits += wide.split([len(gate) for gate in gates[start:end]], dim=1)
        for gate_number, logits_BE in enumerate(logits):
            share_BE = logits_BE.softmax(1)
            if num_own and gate_number < sizes.tasks:  # no share of other tasks' own experts
                first_column = gate_number * sizes.own
                own_share = F.pad(share_BE[:, : sizes.own], (first_column, num_own - first_column - sizes.own))
                share_BE = torch.cat([own_share, share_BE[:, sizes.own :]], dim=1)
            shares.append(share_BE)
        return torch.bmm(torch.stack(shares, dim=1), self.experts(of_experts))


class MultiTask(nn.Module):
    """Levels of gated experts, then a network for each task.

    Args:
        in_size: D.
        levels: Sizes of each level. One level without own experts is MMoE, several with own experts are PLE.
        tower: Layer widths of each task's network, without the last layer of width 1.
    """

    def __init__(
        self,
        in_size: int,
        levels: Sequence[ExpertSizes],
        tower: Sequence[int],
        style: LayerStyle = PLAIN,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tasks = levels[0].tasks
        widths = [in_size, *(sizes.layers[-1] for sizes in levels)]
        last = len(levels) - 1
        self.levels = nn.ModuleList(
            GatedExperts(width, sizes, level_number < last, style, device)
            for level_number, (width, sizes) in enumerate(zip(widths, levels, strict=False))
        )
        self.towers = ParallelMLPs(self.tasks, widths[-1], [*tower, 1], logits=True, style=style, device=device)

    def forward(self, inputs_BD: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T]`."""
        inputs = [inputs_BD] * (self.tasks + 1)
        for level in self.levels:
            inputs = list(level(inputs).unbind(1))
        logits: torch.Tensor = self.towers(inputs).squeeze(2)
        return logits
