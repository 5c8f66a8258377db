"""Losses of retrieval models: the score of the positive item of each query against scores of negatives.

| name | negatives | loss |
|---|---|---|
| `softmax` | all items | cross-entropy over the corpus |
| `sampled_softmax` | sampled | cross-entropy, scores minus log q (Jean et al. 2015) |
| `in_batch` | positives of the global batch | cross-entropy, scores minus log q (Yi et al. 2019) |
| `mixed` | sampled and in-batch | Yang et al. 2020, "Mixed negative sampling" |
| `bce` | sampled | SASRec's, with the mean over negatives |
| `gbce` | sampled | Petrov and Macdonald 2023, arXiv:2308.07192 |
| `bpr` | sampled | Rendle et al. 2009 |

The loss does not depend on the number of ranks: its denominator is global, and in-batch candidates of all ranks are
gathered with their gradients. Shapes: P positions, C candidates, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.samplers import SAMPLERS, Candidates, KnownFrequency, StreamingFrequency

TEMPERATURE = 0.05  # of vectors of length 1
MASKED = float("-inf")  # score of a candidate that is the positive itself


@dataclass(frozen=True, slots=True)
class Pairs:
    """Positive pairs of a query and an item in this rank's batch.

    Args:
        query: `[P, D]`.
        ids: `[P]`, the positive items.
        items: `[P, D]`, vectors of the positive items.
        drawn: `[C, D]`, vectors of the sampled candidates.
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
    """Cross-entropy of the positive against the negatives."""
    return torch.logsumexp(torch.cat([positive_P[:, None], others_PC], dim=1), dim=1) - positive_P


def bce(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """Binary cross-entropy of the positive, plus the mean over the negatives."""
    num_negatives = (others_PC != MASKED).sum(1).clamp(min=1)
    return F.softplus(-positive_P) + F.softplus(others_PC).sum(1) / num_negatives


def gbce(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """Binary cross-entropy with the probability of the positive to the power of `beta`."""
    return (beta * F.softplus(-positive_P) + F.softplus(others_PC).sum(1)) / (1 + others_PC.shape[1])


def bpr(positive_P: torch.Tensor, others_PC: torch.Tensor, beta: float) -> torch.Tensor:
    """Mean over negatives of -log probability that the positive ranks above the negative."""
    num_negatives = (others_PC != MASKED).sum(1).clamp(min=1)
    return F.softplus(others_PC - positive_P[:, None]).sum(1) / num_negatives


@dataclass(frozen=True, slots=True)
class LossKind:
    """The loss function of a position, and the source of its negatives.

    Args:
        function: `(positive_P, others_PC, beta)` to losses `[P]`.
        drawn: a sampler draws negatives.
        in_batch: the positives of the global batch are negatives.
        corrected: log q is subtracted from the scores.
    """

    function: Callable[..., torch.Tensor]
    drawn: bool = True
    in_batch: bool = False
    corrected: bool = False


LOSSES: dict[str, LossKind] = {
    "softmax": LossKind(softmax, drawn=False),
    "sampled_softmax": LossKind(softmax, corrected=True),
    "in_batch": LossKind(softmax, drawn=False, in_batch=True, corrected=True),
    "mixed": LossKind(softmax, in_batch=True, corrected=True),
    "bce": LossKind(bce),
    "gbce": LossKind(gbce),
    "bpr": LossKind(bpr),
}


class RetrievalLoss(nn.Module):
    """The loss over the positions of all ranks.

    Args:
        num_items: I, items of the corpus; ids are in [0, I).
        kind: a key of `LOSSES`.
        negatives: candidates drawn per step, shared by all positions of all ranks.
        sampler: "uniform", or "popularity" with `counts`.
        temperature: divisor of the scores.
        counts: count of each item in the training data, for q of in-batch candidates. None: estimate q during training.
        calibration: t of gBCE. 0: plain BCE; 1: unbiased probabilities.
        seed: seed of the sampler.
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
            raise ValueError(f"loss: unknown kind {kind!r}; choose one of {', '.join(LOSSES)}")
        if sampler not in SAMPLERS:
            raise ValueError(f"loss: unknown sampler {sampler!r}; choose one of {', '.join(SAMPLERS)}")
        if sampler == "popularity" and counts is None:
            raise ValueError("loss: sampler 'popularity' needs counts, the number of occurrences of each item")
        if temperature <= 0:
            raise ValueError(f"loss: temperature={temperature} must be above 0")
        self.kind, self.num_items, self.temperature = LOSSES[kind], num_items, temperature
        basis = num_items if sampler == "uniform" else counts
        self.sampler = SAMPLERS[sampler](basis, negatives, seed) if self.kind.drawn else None
        self.frequency: KnownFrequency | StreamingFrequency | None = None
        if self.kind.in_batch:
            self.frequency = StreamingFrequency(num_items) if counts is None else KnownFrequency(counts)
        alpha = negatives / max(num_items - 1, 1)
        self.beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def draw(self) -> Candidates:
        """Returns the candidates of the step, identical on every rank: all items for `softmax`, none for `in_batch`."""
        device = self.steps.device
        if self.sampler is not None:
            return self.sampler.draw(int(self.steps), device)
        ids = torch.arange(0 if self.kind.in_batch else self.num_items, device=device)
        return Candidates(ids, torch.zeros(len(ids), device=device))

    def forward(self, pairs: Pairs, drawn: Candidates, group: comm.Group) -> torch.Tensor:
        """Returns this rank's share of the loss; the sum over ranks is the weighted mean over positions. Collective.

        Args:
            pairs: positive pairs of this rank, with the vectors of the candidates.
            drawn: the result of `draw`.
        """
        total = comm.all_reduce(pairs.weights.detach().sum(), group).clamp(min=1e-12)
        if not self.kind.in_batch and self.sampler is None:
            # Sums over a corpus need float32, also with `trainer.dense_precision: bf16`.
            query, vectors = _at_least_float32(pairs.query), _at_least_float32(pairs.drawn)
            with torch.autocast(query.device.type, enabled=False):
                return _CorpusSoftmax.apply(query / self.temperature, vectors, pairs.ids, pairs.weights.float() / total)
        positive_P = (pairs.query * pairs.items).sum(1) / self.temperature
        candidates = [(drawn.ids, pairs.drawn, drawn.log_q)] if self.sampler is not None else []
        log_q_P = torch.zeros_like(positive_P) if self.sampler is None else self.sampler.log_q(pairs.ids)
        if self.frequency is not None:
            counts = comm.all_gather(torch.tensor([len(pairs.ids)], device=pairs.ids.device), group).flatten().tolist()
            all_ids = comm.all_gather_uneven(pairs.ids, group)
            log_q = self.frequency.log_q(torch.cat([all_ids, pairs.ids]), all_ids, int(self.steps))
            candidates.append((all_ids, comm.gather_rows(pairs.items, counts, group), log_q[: len(all_ids)]))
            log_q_P = log_q[len(all_ids) :]
        ids_C, vectors_CD, log_q_C = (torch.cat(tensors) for tensors in zip(*candidates, strict=True))
        others_PC = pairs.query @ vectors_CD.T / self.temperature
        if self.kind.corrected:
            positive_P, others_PC = corrected(positive_P, log_q_P), corrected(others_PC, log_q_C)
        others_PC = others_PC.masked_fill(ids_C == pairs.ids[:, None], MASKED)
        losses_P = self.kind.function(positive_P, others_PC, self.beta)
        if self.training:
            self.steps += 1
        return (losses_P * pairs.weights).sum() / total


def with_temperature(loss: dict[str, Any] | None, normalize: bool) -> dict[str, Any]:
    """Returns the arguments of a `RetrievalLoss`, with the default temperature of a model if they have none.

    Args:
        normalize: queries and items have length 1. Scores are then in [-1, 1], too narrow for a softmax over many
            candidates without a temperature.
    """
    return {"temperature": TEMPERATURE if normalize else 1.0, **(loss or {})}


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def corrected(scores: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Scores minus log q, which removes the effect of unequal sampling probabilities."""
    return scores - log_q


class _CorpusSoftmax(torch.autograd.Function):
    """Σ weight · cross-entropy of queries against all items.

    Works on one block of queries at a time and computes the gradient in the same pass, so the scores `[P, I]` are never
    in memory all at once.
    """

    BLOCK_BYTES = 64 << 20

    @staticmethod
    def forward(
        ctx: Any, query_PD: torch.Tensor, vectors_ID: torch.Tensor, ids_P: torch.Tensor, weights_P: torch.Tensor
    ) -> torch.Tensor:
        rows = max(1, _CorpusSoftmax.BLOCK_BYTES // (4 * max(len(vectors_ID), 1)))
        total = query_PD.new_zeros(())
        grad_query, grad_vectors = torch.empty_like(query_PD), torch.zeros_like(vectors_ID)
        for start in range(0, len(query_PD), rows):
            block = slice(start, start + rows)
            scores = query_PD[block] @ vectors_ID.T
            positive = scores.gather(1, ids_P[block, None])
            row_max = scores.amax(1, keepdim=True)
            shares = scores.sub_(row_max).exp_()
            sums = shares.sum(1, keepdim=True)
            weights = weights_P[block, None]
            total += ((sums.log() + row_max - positive) * weights).sum()
            shares.mul_(weights / sums).scatter_add_(1, ids_P[block, None], -weights)
            grad_query[block] = shares @ vectors_ID
            grad_vectors.addmm_(shares.T, query_PD[block])
        ctx.save_for_backward(grad_query, grad_vectors)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, vectors = ctx.saved_tensors
        return query * grads[0], vectors * grads[0], None, None
