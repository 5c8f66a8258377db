"""Gates and experts for several tasks: shared bottom, MMoE (Ma et al. 2018) and PLE (Tang et al. 2020) in one module.

Shapes: B rows, T tasks, E experts, H the width of an expert's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


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

    def forward(self, inputs_EBD: torch.Tensor) -> torch.Tensor:
        """`[E, B, in_size]` to `[E, B, H]`."""
        last = len(self.weights) - 1
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            inputs_EBD = torch.baddbmm(bias, inputs_EBD, weight)
            if place < last or not self.logits:
                inputs_EBD = F.dropout(inputs_EBD.relu(), self.dropout, self.training)
        return inputs_EBD


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
        self.gates = nn.ModuleList(nn.Linear(in_size, count, bias=False, device=device) for count in reach)

    def forward(self, inputs_IBD: torch.Tensor) -> torch.Tensor:
        """`[T + 1, B, D]`, the tasks' inputs and the shared one, to `[T, B, H]`, or `[T + 1, B, H]` if handed on."""
        sizes, own = self.sizes, self.sizes.tasks * self.sizes.own
        of_tasks = inputs_IBD[:-1].repeat_interleave(sizes.own, dim=0) if own else inputs_IBD[:0]
        of_shared = inputs_IBD[-1].expand(sizes.shared, -1, -1)
        found_BEH = self.experts(torch.cat([of_tasks, of_shared])).transpose(0, 1)
        mixes = []
        for place, (gate, x_BD) in enumerate(zip(self.gates, inputs_IBD.unbind(0), strict=False)):
            first = place * sizes.own
            reached = torch.cat([found_BEH[:, first : first + sizes.own], found_BEH[:, own:]], 1) if own else found_BEH
            if place == sizes.tasks:
                reached = found_BEH
            mixes.append(torch.bmm(gate(x_BD).softmax(1)[:, None], reached).squeeze(1))
        return torch.stack(mixes)


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
        mixed = inputs_BD.expand(self.tasks + 1, -1, -1)
        for level in self.levels:
            mixed = level(mixed)
        logits: torch.Tensor = self.towers(mixed).squeeze(2).T
        return logits
