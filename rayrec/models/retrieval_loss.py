"""Losses of retrieval models: a query against the item that followed, and against others.

| name | others | |
|---|---|---|
| `softmax` | all items | cross-entropy over the corpus |
| `sampled_softmax` | drawn by a sampler | scores less log q (Jean et al. 2015) |
| `in_batch` | positives of the step, of all ranks | scores less log q (Yi et al. 2019) |
| `mixed` | both | Yang et al. 2020, "Mixed negative sampling" |
| `bce` | drawn | as SASRec's, with the mean over negatives |
| `gbce` | drawn | Petrov and Macdonald 2023, arXiv:2308.07192 |
| `bpr` | drawn | Rendle et al. 2009 |

The loss is one function of the rows of all ranks: its denominator is global, and candidates of all ranks are gathered
with their gradient. Shapes: P positions, C candidates, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.samplers import SAMPLERS, Drawn, KnownFrequency, StreamingFrequency

HIT = float("-inf")


@dataclass(frozen=True, slots=True)
class Pairs:
    """This rank's positions of a step.

    Args:
        query: `[P, D]`.
        ids: `[P]`, the item that followed.
        items: `[P, D]`, its vectors.
        drawn: `[C, D]`, vectors of the candidates that were drawn.
        weight: `[P]`; None: all 1.
    """

    query: torch.Tensor
    ids: torch.Tensor
    items: torch.Tensor
    drawn: torch.Tensor
    weight: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor:
        return self.query.new_ones(len(self.ids)) if self.weight is None else self.weight


def softmax(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """-log of the positive's share."""
    return torch.logsumexp(torch.cat([positive_P[:, None], others_PC], dim=1), dim=1) - positive_P


def bce(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """The positive's and the mean negative's binary cross-entropy."""
    known = (others_PC != HIT).sum(1).clamp(min=1)
    return F.softplus(-positive_P) + F.softplus(others_PC).sum(1) / known


def gbce(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """Binary cross-entropy with the positive's probability to the power of `beta`."""
    return (beta * F.softplus(-positive_P) + F.softplus(others_PC).sum(1)) / (1 + others_PC.shape[1])


def bpr(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """-log probability that the positive is above a negative, the mean over negatives."""
    known = (others_PC != HIT).sum(1).clamp(min=1)
    return F.softplus(others_PC - positive_P[:, None]).sum(1) / known


@dataclass(frozen=True, slots=True)
class Recipe:
    """A loss of a position, and where its candidates come from."""

    function: Callable[..., torch.Tensor]
    drawn: bool = True
    in_batch: bool = False
    corrected: bool = False  # scores less log q


LOSSES: dict[str, Recipe] = {
    "softmax": Recipe(softmax, drawn=False),
    "sampled_softmax": Recipe(softmax, corrected=True),
    "in_batch": Recipe(softmax, drawn=False, in_batch=True, corrected=True),
    "mixed": Recipe(softmax, in_batch=True, corrected=True),
    "bce": Recipe(bce),
    "gbce": Recipe(gbce),
    "bpr": Recipe(bpr),
}


class RetrievalLoss(nn.Module):
    """The loss of all ranks' positions.

    Args:
        num_items: I, items of the corpus; ids lie in [0, I).
        kind: of `LOSSES`.
        negatives: candidates drawn in a step, for all positions of all ranks together.
        sampler: "uniform", or "popularity" with `counts`.
        temperature: scores are divided by it.
        counts: of each item in the training data; for q of in-batch candidates. None: q is estimated while training.
        calibration: t of gBCE: 0: plain BCE; 1: unbiased probabilities.
        seed: of the sampler.
    """

    steps: torch.Tensor

    def __init__(
        self,
        num_items: int,
        *,
        kind: str = "sampled_softmax",
        negatives: int = 256,
        sampler: str = "uniform",
        temperature: float = 1.0,
        counts: Any = None,
        calibration: float = 0.75,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if kind not in LOSSES:
            raise ValueError(f"loss: there is no kind {kind!r}; there are {', '.join(LOSSES)}")
        if sampler not in SAMPLERS:
            raise ValueError(f"loss: there is no sampler {sampler!r}; there are {', '.join(SAMPLERS)}")
        if sampler == "popularity" and counts is None:
            raise ValueError("loss: sampler 'popularity' needs counts, the number of times that each item comes")
        if temperature <= 0:
            raise ValueError(f"loss: temperature={temperature} must be above 0")
        self.recipe, self.num_items, self.temperature = LOSSES[kind], num_items, temperature
        basis = num_items if sampler == "uniform" else counts
        self.sampler = SAMPLERS[sampler](basis, negatives, seed) if self.recipe.drawn else None
        self.frequency: KnownFrequency | StreamingFrequency | None = None
        if self.recipe.in_batch:
            self.frequency = StreamingFrequency(num_items) if counts is None else KnownFrequency(counts)
        alpha = negatives / max(num_items - 1, 1)
        self.beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def draw(self) -> Drawn:
        """The step's candidates, the same on every rank; all items for `softmax`, none where the batch has them."""
        device = self.steps.device
        if self.sampler is not None:
            return self.sampler.draw(int(self.steps), device)
        ids = torch.arange(0 if self.recipe.in_batch else self.num_items, device=device)
        return Drawn(ids, torch.zeros(len(ids), device=device))

    def forward(self, pairs: Pairs, drawn: Drawn, group: comm.Group) -> torch.Tensor:
        """This rank's part of the loss: the sum over ranks is the mean over all positions, by weight. Collective.

        Args:
            drawn: of `draw`, with vectors in `pairs.drawn`.
        """
        total = comm.all_reduce(pairs.weights.detach().sum(), group).clamp(min=1e-12)
        if not self.recipe.in_batch and self.sampler is None:
            query = pairs.query / self.temperature
            return _CorpusSoftmax.apply(query, pairs.drawn, pairs.ids, pairs.weights / total)
        positive_P = (pairs.query * pairs.items).sum(1) / self.temperature
        candidates = [(drawn.ids, pairs.drawn, drawn.log_q)] if self.sampler is not None else []
        log_q_P = torch.zeros_like(positive_P) if self.sampler is None else self.sampler.log_q(pairs.ids)
        if self.frequency is not None:
            counts = comm.all_gather(torch.tensor([len(pairs.ids)]), group).flatten().tolist()
            all_ids = comm.all_gather_uneven(pairs.ids, group)
            log_q = self.frequency.log_q(torch.cat([all_ids, pairs.ids]), all_ids, int(self.steps))
            candidates.append((all_ids, comm.gather_rows(pairs.items, counts, group), log_q[: len(all_ids)]))
            log_q_P = log_q[len(all_ids) :]
        ids_C, vectors_CD, log_q_C = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        others_PC = pairs.query @ vectors_CD.T / self.temperature
        if self.recipe.corrected:
            positive_P, others_PC = corrected(positive_P, log_q_P), corrected(others_PC, log_q_C)
        others_PC = others_PC.masked_fill(ids_C == pairs.ids[:, None], HIT)
        losses_P = self.recipe.function(positive_P, others_PC, self.beta)
        if self.training:
            self.steps += 1
        return (losses_P * pairs.weights).sum() / total


def corrected(scores: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Scores as if every candidate were as likely to be drawn: less log q."""
    return scores - log_q


class _CorpusSoftmax(torch.autograd.Function):
    """Σ weight · cross-entropy of queries against all items, `[P, I]` scores never held at once: one block of queries
    after another, with the gradient in the same pass."""

    BLOCK_BYTES = 64 << 20

    @staticmethod
    def forward(
        ctx: Any, query_PD: torch.Tensor, vectors_ID: torch.Tensor, ids_P: torch.Tensor, weights_P: torch.Tensor
    ) -> torch.Tensor:
        rows = max(1, _CorpusSoftmax.BLOCK_BYTES // (4 * max(len(vectors_ID), 1)))
        total = query_PD.new_zeros(())
        grad_query, grad_vectors = torch.empty_like(query_PD), torch.zeros_like(vectors_ID)
        for start in range(0, len(query_PD), rows):
            part = slice(start, start + rows)
            scores = query_PD[part] @ vectors_ID.T
            positive = scores.gather(1, ids_P[part, None])
            most = scores.amax(1, keepdim=True)
            shares = scores.sub_(most).exp_()
            sums = shares.sum(1, keepdim=True)
            weights = weights_P[part, None]
            total += ((sums.log() + most - positive) * weights).sum()
            shares.mul_(weights / sums).scatter_add_(1, ids_P[part, None], -weights)
            grad_query[part] = shares @ vectors_ID
            grad_vectors.addmm_(shares.T, query_PD[part])
        ctx.save_for_backward(grad_query, grad_vectors)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, vectors = ctx.saved_tensors
        return query * grads[0], vectors * grads[0], None, None
