"""Gates and experts for several tasks: shared bottom, MMoE (Ma et al. 2018) and PLE (Tang et al. 2020) in one module.

Shapes: B rows, T tasks, E experts, H the width of an expert's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.onednn_linear import Linear, linear


class ParallelMLPs(nn.Module):
    """E networks of one shape, computed together. ReLU after every layer but, if `logits`, the last.

    Args:
        count: E.
        in_size: width of the input.
        layer_sizes: width of each layer's output.
    """

    def __init__(
        self,
        count: int,
        in_size: int,
        layer_sizes: Sequence[int],
        logits: bool = False,
        dropout: float = 0.0,
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
        self.logits, self.dropout = logits, dropout

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[B, E, H]` from `[B, in_size]` for each network; neighbours with one input share their first product."""
        x_BEH = _products(inputs, self.weights[0], self.biases[0])
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            x_BEH = self._active(x_BEH)
            if x_BEH.device.type == "cpu":
                x_BEH = _products(x_BEH.unbind(1), weight, bias)
            else:  # one kernel for all
                x_BEH = torch.baddbmm(bias, x_BEH.transpose(0, 1), weight).transpose(0, 1)
        return x_BEH if self.logits else self._active(x_BEH)

    def _active(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.relu(), self.dropout, self.training)


def _products(inputs: Sequence[torch.Tensor], weight_EIO: torch.Tensor, bias_E1O: torch.Tensor) -> torch.Tensor:
    """`[B, E, O]`, each network's input times its weights; those of neighbours with one input by one product."""
    weights, biases = weight_EIO.mT, bias_E1O[:, 0]
    products = [
        linear(one, weights[start:end].flatten(0, 1), biases[start:end].flatten()).unflatten(1, (end - start, -1))
        for one, start, end in _neighbours(inputs)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _neighbours(inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int, int]]:
    """Each input once for its neighbours that are the same: with the first place, and the one after the last."""
    places = [place for place, one in enumerate(inputs) if place == 0 or one is not inputs[place - 1]]
    return [(inputs[start], start, end) for start, end in pairwise([*places, len(inputs)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of a level of experts.

    Args:
        tasks: T.
        own: experts that one task has for itself; 0 for MMoE and shared bottom.
        shared: experts of all tasks; 1 without own ones is a shared bottom.
        layers: layer widths of every expert.
    """

    tasks: int
    own: int
    shared: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.own < 0 or self.shared < 1 or not self.layers:
            raise ValueError(f"{self}: at least one task, one shared expert and one layer are needed, and own >= 0")


class GatedExperts(nn.Module):
    """One level. A task's gate mixes its own experts and the shared ones; the shared gate, if any, mixes all.

    Args:
        in_size: width of each input.
        sizes: of the level.
        hands_on: there is another level: the output has a shared mix as well.
    """

    def __init__(
        self,
        in_size: int,
        sizes: ExpertSizes,
        hands_on: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.num_experts = sizes.tasks * sizes.own + sizes.shared
        self.experts = ParallelMLPs(self.num_experts, in_size, sizes.layers, dropout=dropout, device=device)
        reach = [sizes.own + sizes.shared] * sizes.tasks + [self.num_experts] * hands_on
        self.gates = nn.ModuleList(Linear(in_size, count, bias=False, device=device) for count in reach)

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tasks' inputs and the shared one, `[B, D]` each, to `[B, T, H]`, or `[B, T + 1, H]` if handed on."""
        sizes, own = self.sizes, self.sizes.tasks * self.sizes.own
        of_experts = [one for one in inputs[:-1] for _ in range(sizes.own)] + [inputs[-1]] * sizes.shared
        gates: list[torch.Tensor] = list(self.gates.parameters())
        logits, shares = list[torch.Tensor](), list[torch.Tensor]()
        for x_BD, start, end in _neighbours(inputs[: len(gates)]):
            wide = linear(x_BD, torch.cat(gates[start:end]), None)
            logits += wide.split([len(gate) for gate in gates[start:end]], dim=1)
        for place, logits_BE in enumerate(logits):
            share_BE = logits_BE.softmax(1)
            if own and place < sizes.tasks:  # other tasks' own experts have no share
                before = place * sizes.own
                of_own = F.pad(share_BE[:, : sizes.own], (before, own - before - sizes.own))
                share_BE = torch.cat([of_own, share_BE[:, sizes.own :]], dim=1)
            shares.append(share_BE)
        return torch.bmm(torch.stack(shares, dim=1), self.experts(of_experts))


class MultiTask(nn.Module):
    """Levels of gated experts, then a network for each task.

    Args:
        in_size: D.
        levels: sizes of each level; one without own experts is MMoE, several with own ones are PLE.
        tower: layer widths of each task's network, without the last one of 1.
    """

    def __init__(
        self,
        in_size: int,
        levels: Sequence[ExpertSizes],
        tower: Sequence[int],
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tasks = levels[0].tasks
        widths = [in_size, *(sizes.layers[-1] for sizes in levels)]
        last = len(levels) - 1
        self.levels = nn.ModuleList(
            GatedExperts(width, sizes, place < last, dropout, device)
            for place, (width, sizes) in enumerate(zip(widths, levels, strict=False))
        )
        self.towers = ParallelMLPs(self.tasks, widths[-1], [*tower, 1], logits=True, dropout=dropout, device=device)

    def forward(self, inputs_BD: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T]`."""
        inputs = [inputs_BD] * (self.tasks + 1)
        for level in self.levels:
            inputs = list(level(inputs).unbind(1))
        logits: torch.Tensor = self.towers(inputs).squeeze(2)
        return logits
