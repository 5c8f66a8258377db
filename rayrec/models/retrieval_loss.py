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
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Prepared
from rayrec.models.corpus import Corpus
from rayrec.models.samplers import (
    SAMPLERS,
    KnownFrequency,
    PopularitySampler,
    StreamingFrequency,
    UniformSampler,
)

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
        hard: ids `[H]` and vectors `[H, D]` of negatives that the batch names, for in-batch losses; None: none.
    """

    query: torch.Tensor
    ids: torch.Tensor
    items: torch.Tensor
    drawn: torch.Tensor
    weight: torch.Tensor | None = None
    hard: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids `[P + H]` and vectors `[P + H, D]`: what this rank adds to the candidates of in-batch losses."""
        if self.hard is None:
            return self.ids, self.items
        return torch.cat([self.ids, self.hard[0]]), torch.cat([self.items, self.hard[1]])

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
        num_items: I, rows of the item table; ids are in [0, I).
        kind: a key of `LOSSES`.
        negatives: candidates drawn per step, shared by all positions of all ranks.
        sampler: "uniform", or "popularity" with `counts`.
        power: exponent of the counts in "popularity".
        temperature: divisor of the scores; None: 1.
        counts: count of each item in the training data, for "popularity" and for q of in-batch candidates; "data": the
            trainer gives them to `set_counts` before the first step. None: estimate q during training.
        hard_negatives: for in-batch losses, `Pairs.hard` are candidates.
        calibration: t of gBCE. 0: plain BCE; 1: unbiased probabilities.
        seed: seed of the sampler.
    """

    steps: torch.Tensor
    block_bytes = 64 << 20  # of the scores of a block of queries

    def __init__(
        self,
        num_items: int,
        *,
        kind: str = "sampled_softmax",
        negatives: int = 256,
        sampler: str = "uniform",
        power: float = 1.0,
        temperature: float | None = None,
        counts: Any = None,
        hard_negatives: bool = False,
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
        temperature = 1.0 if temperature is None else temperature
        if temperature <= 0:
            raise ValueError(f"loss: temperature={temperature} must be above 0")
        if counts is not None and not isinstance(counts, str) and len(counts) != num_items:
            raise ValueError(f"loss: {len(counts)} counts were given for {num_items} rows of the item table")
        self.kind, self.temperature = LOSSES[kind], temperature
        self.hard_negatives, self.calibration = hard_negatives and self.kind.in_batch, calibration
        self.sampler: UniformSampler | PopularitySampler | None = None
        self.frequency: KnownFrequency | StreamingFrequency | None = None
        from_data = isinstance(counts, str)
        if self.kind.drawn:
            popular = sampler == "popularity"
            self.sampler = (
                PopularitySampler(num_items, negatives, seed, power, kept=from_data)
                if popular
                else UniformSampler(num_items, negatives, seed)
            )
        if self.kind.in_batch:
            known = counts is not None
            self.frequency = KnownFrequency(num_items, kept=from_data) if known else StreamingFrequency(num_items)
        if counts is not None and not from_data:
            self.set_counts(torch.as_tensor(counts, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._step: int | None = None  # `steps` on the host
        self.use_corpus(Corpus(num_items))

    @property
    def lacks_counts(self) -> bool:
        """Whether the counts of the training data are needed and not set. Waits for the device."""
        return any(not bool(module.total > 0) for module in self.counted.values())

    @property
    def counted(self) -> dict[str, PopularitySampler | KnownFrequency]:
        """The modules with counts of items in the training data, by name."""
        named = {"sampler": self.sampler, "frequency": self.frequency}
        return {name: part for name, part in named.items() if isinstance(part, PopularitySampler | KnownFrequency)}

    def set_counts(self, counts_I: torch.Tensor) -> None:
        """Sets the count of each item in the training data.

        Raises:
            ValueError: all counts are 0.
        """
        if not bool(counts_I.sum() > 0):
            raise ValueError("loss: at least one of the counts must be above 0")
        for module in self.counted.values():
            module.set_counts(counts_I)

    def renew(self, rows: torch.Tensor) -> None:
        """Forgets the estimated frequency of items, whose rows now belong to other items."""
        if isinstance(self.frequency, StreamingFrequency):
            self.frequency.renew(rows)

    def use_corpus(self, corpus: Corpus) -> None:
        """Sets the rows of the item table that are items; the others are neither positives nor negatives."""
        self.corpus = corpus
        for module in (self.sampler, self.frequency):
            if module is not None:
                module.corpus = corpus

    def reads_all_positives(self, group: comm.Group) -> bool:
        """Whether the loss reads the positives of all ranks."""
        return self.kind.in_batch or (self.sampler is None and group is not None and group.size() > 1)

    @property
    def beta(self) -> float:
        """Exponent of gBCE's positive probability."""
        negatives = 0 if self.sampler is None else self.sampler.count
        alpha = negatives / max(len(self.corpus) - 1, 1)
        return alpha * (self.calibration * (1 - 1 / alpha) + 1 / alpha) if alpha else 1.0

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._step = None

    @property
    def step(self) -> int:
        """Number of training steps so far. Waits for the device once after a state was loaded."""
        if self._step is None:
            self._step = int(self.steps)
        return self._step

    def draw(self, group: comm.Group = None, step: int | None = None) -> torch.Tensor:
        """Returns the candidates of a step on the host: identical on every rank; for `softmax`, the rank's part of all
        items; for `in_batch`, none.

        Args:
            step: number of the step; default: the next one.
        """
        if self.sampler is not None:
            return self.sampler.draw(self.step if step is None else step)
        part = range(0) if self.kind.in_batch else self._part(group)
        return self.corpus.rows(torch.arange(part.start, part.stop))

    def _part(self, group: comm.Group) -> range:
        """The items of this rank."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        step = -(-len(self.corpus) // size)
        return range(len(self.corpus))[rank * step : (rank + 1) * step]

    def _block_rows(self, candidates: int) -> int:
        """Queries in a block."""
        return max(1, self.block_bytes // (4 * max(candidates, 1)))

    def _is_item(self, ids: torch.Tensor) -> torch.Tensor:
        return self.corpus.items(ids) >= 0

    def forward(
        self, pairs: Pairs, drawn: torch.Tensor, group: comm.Group, prepared: Prepared | None = None
    ) -> torch.Tensor:
        """Returns this rank's share of the loss; the sum over ranks is the weighted mean over positions. Collective.

        Args:
            pairs: positive pairs of this rank, with the vectors of the candidates. A pair of no item has no weight.
            drawn: the result of `draw`, on the device.
            prepared: has the in-batch candidates of all ranks, if they were gathered ahead.
        """
        weights_P = pairs.weights * self._is_item(pairs.ids)
        total = comm.all_reduce(weights_P.detach().sum(), group).clamp(min=1e-12)
        weights_P = weights_P / total
        step, self._step = self.step, self.step + self.training
        self.steps += int(self.training)
        if not self.kind.in_batch and self.sampler is None:
            # Sums over a corpus need float32, also with `trainer.dense_precision: bf16`.
            query, vectors = _at_least_float32(pairs.query), _at_least_float32(pairs.drawn)
            places = self.corpus.items(pairs.ids).clamp(min=0)
            with torch.autocast(query.device.type, enabled=False):
                if group is None or group.size() == 1:
                    inputs = query / self.temperature, vectors, places, weights_P.float()
                    return _CorpusSoftmax.apply(self._block_rows(len(vectors)), *inputs)
                part, most = self._part(group), -(-len(self.corpus) // group.size())
                if prepared is not None and prepared.pool_sizes is not None:
                    counts, all_ids = list(prepared.pool_sizes), prepared.index["pool"]
                else:
                    counts, all_ids = _gathered(pairs.ids, group)
                places_Q = self.corpus.items(all_ids).clamp(min=0)
                inputs = query / self.temperature, vectors, places_Q, weights_P.float()
                return _ShardedSoftmax.apply(self._block_rows(most), group, part.start, counts, *inputs)
        candidates = [(drawn, pairs.drawn, self.sampler.log_q(drawn))] if self.sampler is not None else []
        log_q_P = pairs.query.new_zeros(len(pairs.ids)) if self.sampler is None else self.sampler.log_q(pairs.ids)
        if self.frequency is not None:
            pool_ids, pool_vectors = pairs.pool
            if prepared is not None and prepared.pool_sizes is not None:
                counts, all_ids = list(prepared.pool_sizes), prepared.index["pool"]
                met = prepared.index["met"], prepared.index["times_met"]
            else:
                counts, all_ids = _gathered(pool_ids, group)
                met = all_ids.unique(return_counts=True)
            log_q = self.frequency.log_q(torch.cat([all_ids, pairs.ids]), all_ids, step, met)
            log_q_C = log_q[: len(all_ids)].masked_fill(~self._is_item(all_ids), -MASKED)
            candidates.append((all_ids, comm.gather_rows(pool_vectors, counts, group), log_q_C))
            log_q_P = log_q[len(all_ids) :]
        ids_C, vectors_CD, log_q_C = (torch.cat(tensors) for tensors in zip(*candidates, strict=True))
        # A q that all candidates share cancels out; to subtract it would take a pass over all scores.
        is_constant = self.frequency is None and isinstance(self.sampler, UniformSampler)
        q_P, q_C = (log_q_P, log_q_C) if self.kind.corrected and not is_constant else (None, None)

        def of_block(block: slice, query: torch.Tensor, items: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
            query = query / self.temperature  # the queries are fewer numbers than the scores
            positive_P = (query * items).sum(1)
            others_PC = query @ vectors.T
            if q_P is not None and q_C is not None:
                positive_P, others_PC = positive_P - q_P[block], others_PC - q_C
            others_PC = others_PC.masked_fill(ids_C == pairs.ids[block, None], MASKED)
            return (self.kind.function(positive_P, others_PC, self.beta) * weights_P[block]).sum()

        rows = self._block_rows(len(ids_C))
        if len(pairs.ids) <= rows:
            return of_block(slice(None), pairs.query, pairs.items, vectors_CD)
        share: torch.Tensor = _InBlocks.apply(of_block, rows, pairs.query, pairs.items, vectors_CD)
        return share


def with_temperature(loss: dict[str, Any] | None, normalize: bool) -> dict[str, Any]:
    """Returns the arguments of a `RetrievalLoss`, with the default temperature of a model if they have none.

    Args:
        normalize: queries and items have length 1. Scores are then in [-1, 1], too narrow for a softmax over many
            candidates without a temperature.
    """
    given = {} if loss is None else {name: value for name, value in loss.items() if value is not None}
    return {"temperature": TEMPERATURE if normalize else 1.0, **given}


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _InBlocks(torch.autograd.Function):
    """Σ of a function over blocks of queries.

    Computes the gradient of a block in the same pass, so the scores `[P, C]` are never in memory all at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., torch.Tensor],
        rows: int,
        query_PD: torch.Tensor,
        items_PD: torch.Tensor,
        vectors_CD: torch.Tensor,
    ) -> torch.Tensor:
        total, vectors = query_PD.new_zeros((), dtype=torch.float32), vectors_CD.detach().requires_grad_()
        grad_query, grad_items = torch.empty_like(query_PD), torch.empty_like(items_PD)
        grad_vectors = torch.zeros_like(vectors_CD)
        for start in range(0, len(query_PD), rows):
            block = slice(start, start + rows)
            with torch.enable_grad():
                inputs = query_PD[block].detach().requires_grad_(), items_PD[block].detach().requires_grad_(), vectors
                value = function(block, *inputs)
            grad_query[block], grad_items[block], grad = torch.autograd.grad(value, inputs)
            grad_vectors += grad
            total = total + value.detach()
        ctx.save_for_backward(grad_query, grad_items, grad_vectors)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(saved * grads[0] for saved in ctx.saved_tensors)


class _CorpusSoftmax(torch.autograd.Function):
    """Σ weight · cross-entropy of queries against all items.

    Works on one block of queries at a time and computes the gradient in the same pass, so the scores `[P, I]` are never
    in memory all at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: int,
        query_PD: torch.Tensor,
        vectors_ID: torch.Tensor,
        ids_P: torch.Tensor,
        weights_P: torch.Tensor,
    ) -> torch.Tensor:
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
        return None, query * grads[0], vectors * grads[0], None, None


class _ShardedSoftmax(torch.autograd.Function):
    """This rank's share of Σ weight · cross-entropy of the queries of all ranks against all items.

    Each rank has the vectors of its part of the items and scores all queries against them; the largest score and the
    sum of a query take two all-reduces a block, as in Megatron's vocabulary-parallel loss (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). Backward computes the scores again, so memory is that of all queries and one block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: int,
        group: dist.ProcessGroup,
        first: int,
        counts: list[int],
        query_PD: torch.Tensor,
        vectors_ID: torch.Tensor,
        places_Q: torch.Tensor,
        weights_P: torch.Tensor,
    ) -> torch.Tensor:
        """
        Args:
            rows: queries of a block, the same on all ranks.
            first: place of this rank's first item.
            counts: queries of each rank.
        """
        query_QD = comm.gather_rows(query_PD, counts, group)
        weights_Q = comm.gather_rows(weights_P[:, None], counts, group)[:, 0]
        log_sums, positives = torch.empty_like(weights_Q), torch.empty_like(weights_Q)
        for start in range(0, len(query_QD), rows):
            block = slice(start, start + rows)
            scores = query_QD[block] @ vectors_ID.T
            lowest = scores.new_full((len(scores), 1), torch.finfo(scores.dtype).min)
            highest = comm.all_reduce(torch.cat([scores, lowest], dim=1).amax(1), group, dist.ReduceOp.MAX)
            sums = torch.zeros(2, len(scores), dtype=scores.dtype, device=scores.device)
            places, is_own = _own_places(places_Q[block], first, len(vectors_ID))
            if len(vectors_ID):
                sums[1] = scores.gather(1, places[:, None])[:, 0] * is_own
            sums[0] = scores.sub_(highest[:, None]).exp_().sum(1)
            sums = comm.all_reduce(sums, group)
            log_sums[block], positives[block] = sums[0].log() + highest, sums[1]
        own = slice(begin := sum(counts[: group.rank()]), begin + len(query_PD))
        ctx.rows, ctx.group, ctx.first, ctx.counts, ctx.own = rows, group, first, counts, own
        ctx.save_for_backward(query_QD, vectors_ID, places_Q, weights_Q, log_sums)
        return ((log_sums - positives) * weights_Q)[own].sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_QD, vectors_ID, places_Q, weights_Q, log_sums = ctx.saved_tensors
        # Each rank may weigh its share in another way.
        factors = comm.all_gather(grads[0].reshape(1), ctx.group).flatten()
        weights_Q = weights_Q * torch.cat([x.expand(count) for x, count in zip(factors, ctx.counts, strict=True)])
        grad_query, grad_vectors = torch.zeros_like(query_QD), torch.zeros_like(vectors_ID)
        for start in range(0, len(query_QD) if len(vectors_ID) else 0, ctx.rows):
            block = slice(start, start + ctx.rows)
            weights = weights_Q[block, None]
            shares = (query_QD[block] @ vectors_ID.T).sub_(log_sums[block, None]).exp_().mul_(weights)
            places, is_own = _own_places(places_Q[block], ctx.first, len(vectors_ID))
            shares.scatter_add_(1, places[:, None], -weights * is_own[:, None])
            grad_query[block] = shares @ vectors_ID
            grad_vectors.addmm_(shares.T, query_QD[block])
        grad_query = comm.all_reduce(grad_query, ctx.group)[ctx.own]
        return None, None, None, None, grad_query, grad_vectors, None, None


def _gathered(ids: torch.Tensor, group: comm.Group) -> tuple[list[int], torch.Tensor]:
    """The number of ids of each rank, and those of all. Waits for the device."""
    sizes = comm.all_gather(torch.tensor([len(ids)], device=ids.device), group)
    return sizes.flatten().tolist(), comm.all_gather_uneven(ids, group)


def _own_places(places: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places among this rank's items, 0 for others, and whether they are its own."""
    is_own = (places >= first) & (places < first + count)
    return torch.where(is_own, places - first, 0), is_own
