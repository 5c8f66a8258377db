"""Losses of rankers, and checks of settings that the models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch
from rayrec.models.loss_config import Bce, Focal, Huber, ListNet, LossConfig, Mse, Poisson, Ziln
from rayrec.modules import EmbeddingBagConfig


def common_dim(model: str, tables: Sequence[EmbeddingBagConfig]) -> int:
    """Returns the `embedding_dim` that all tables have.

    Raises:
        ValueError: no tables, or tables of different widths; names them.
    """
    dims = {table.name: table.embedding_dim for table in tables}
    if len(set(dims.values())) != 1:
        raise ValueError(f"{model}: all tables need the same embedding_dim; they have {dims}")
    return next(iter(dims.values()))


def check_logits(model: str, setting: str, sizes: Sequence[int], task_weights: Sequence[float] | None) -> None:
    """Raises ValueError if the last layer width is not the number of labels."""
    num_logits = 1 if task_weights is None else len(task_weights)
    if not sizes or sizes[-1] != num_logits:
        meaning = "the logit" if task_weights is None else "one logit per label"
        raise ValueError(f"{model}: {setting}={list(sizes)} must end with {num_logits}, {meaning}")


BCE = Bce()
# e to the model's output, of a Poisson or lognormal prediction, is at most this: a larger one has no use as a float32.
MAX_EXPONENT = 80.0


def binary_losses(logits: torch.Tensor, label: torch.Tensor, loss: LossConfig = BCE) -> torch.Tensor:
    """Returns the loss of each logit of a binary label; `logits` and `label` have the same shape."""
    if isinstance(loss, Bce | Mse) and loss.label_smoothing:
        target = label * (1 - loss.label_smoothing) + loss.label_smoothing / 2
    else:
        target = label
    if isinstance(loss, Mse):
        return (logits.sigmoid() - target).square()
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    if isinstance(loss, Focal):
        losses = losses * torch.where(label > 0.5, -logits, logits).sigmoid() ** loss.gamma
        return losses if loss.alpha is None else losses * torch.where(label > 0.5, loss.alpha, 1 - loss.alpha)
    if isinstance(loss, Bce) and loss.positive_weight != 1:
        return losses * torch.where(label > 0.5, loss.positive_weight, 1.0)
    return losses


def number_losses(outputs: torch.Tensor, label: torch.Tensor, loss: LossConfig = BCE) -> torch.Tensor:
    """Returns the loss of each output for a numeric label, of the same shape; the squared error by default."""
    if isinstance(loss, Huber):
        return F.huber_loss(outputs, label, reduction="none", delta=loss.delta)
    if isinstance(loss, Poisson):
        return F.poisson_nll_loss(outputs.clamp(max=MAX_EXPONENT), label, reduction="none")
    return (outputs - label).square()


def ziln_losses(outputs_B3: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
    """Zero-inflated lognormal loss (Wang et al. 2019, arXiv:1912.07753), `[B]`.

    Args:
        outputs_B3: logit of a label above 0, mean of its logarithm, and softplus⁻¹ of the logarithm's deviation.
        label_B: at least 0.
    """
    logit, mean, raw = outputs_B3.unbind(1)
    positive, deviation = label_B > 0, _deviation(raw)
    log_label = torch.where(positive, label_B, 1.0).log()
    density = log_label + deviation.log() + 0.5 * math.log(2 * math.pi) + ((log_label - mean) / deviation).square() / 2
    return F.binary_cross_entropy_with_logits(logit, positive.to(logit.dtype), reduction="none") + positive * density


def ziln_mean(outputs_B3: torch.Tensor) -> torch.Tensor:
    """Returns the expected label, `[B]`."""
    logit, mean, raw = outputs_B3.unbind(1)
    return logit.sigmoid() * (mean + _deviation(raw).square() / 2).clamp(max=MAX_EXPONENT).exp()


def _deviation(raw: torch.Tensor) -> torch.Tensor:
    """Above the root of float32's precision, as in the authors' code."""
    return F.softplus(raw).clamp(min=3.5e-4)


class Head(nn.Module):
    """Reshapes the outputs of the last layer to logits and computes the loss.

    Args:
        task_weights: loss weight of each label; None for a single label.
        label_kinds: "binary" or "number" for each label; None: all binary.
    """

    _task_weights: torch.Tensor | None
    _numbers: torch.Tensor | None

    def __init__(
        self,
        task_weights: Sequence[float] | None,
        device: torch.device | str | None = None,
        label_kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        weights = None if task_weights is None else torch.tensor(list(task_weights), device=device)
        self.register_buffer("_task_weights", weights, persistent=False)
        numbers = [kind == "number" for kind in label_kinds or ()]
        mask = torch.tensor(numbers, device=device) if any(numbers) else None
        self.register_buffer("_numbers", mask, persistent=False)
        self.loss: LossConfig = BCE  # `model.loss` of a config replaces it
        self._group: comm.Group = None

    def on_sharded(self, group: comm.Group) -> None:
        """Sets the ranks whose rows the loss compares; called when the tables are sharded over `group`."""
        self._group = group

    def forward(self, outputs_BT: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss, and logits `[B]`, or `[B, T]` with several labels. The logit of a number is its
        prediction.

        The loss is NaN in an export, which reads only the logits, and outside training if it compares rows, as it would
        gather the rows of all ranks.
        """
        outputs = outputs_BT.squeeze(1) if self._task_weights is None else outputs_BT
        logits = self._predictions(outputs)
        if torch.compiler.is_exporting() or (self.loss.compares_rows and not self.training):
            return logits.new_full((), math.nan), logits
        if self.loss.compares_rows:
            function = listnet_loss if isinstance(self.loss, ListNet) else pairwise_loss
            share = function(logits, batch, self._group, by_group=self.loss.by_group)
            # `share * 0` keeps the collectives in the backward of a rank with an empty batch.
            return rank_mean(share, batch, self._group), logits + share * 0
        return mean_loss(outputs, batch, self._task_weights, self._numbers, self.loss), logits

    def _predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        if isinstance(self.loss, Ziln):
            return ziln_mean(outputs)
        if not isinstance(self.loss, Poisson) or self._numbers is None:
            return outputs
        rates = outputs.clamp(max=MAX_EXPONENT).exp()
        return rates if outputs.dim() == 1 else torch.where(self._numbers, rates, outputs)


def mean_loss(
    logits: torch.Tensor,
    batch: Batch,
    task_weights_T: torch.Tensor | None = None,
    numbers_T: torch.Tensor | None = None,
    loss: LossConfig = BCE,
) -> torch.Tensor:
    """Weighted mean of the loss over the batch: Σ w loss / Σ w.

    With several labels, the loss of a row is the sum over its labels, weighted by `task_weights_T`. An unobserved label
    (NaN) adds 0, but its row still counts in Σ w. So the influence of a rare label is proportional to the rows that
    have it, and the mean over batches or ranks is the mean over all rows.

    Args:
        logits: outputs of the model, `[B]` or `[B, T]`, the shape of the labels; `[B, 3]` for ZILN.
        task_weights_T: weight of each label; None: all 1.
        numbers_T: mask of the labels that are numbers; None: all are binary.
        loss: a loss that does not compare rows. If it is one of binary labels, numbers have the squared error; if it
            is one of numbers, binary labels have the cross-entropy.

    Returns:
        A scalar; 0 with zero gradients if the batch is empty or all weights are 0.
    """
    if batch.rows == 0:
        return logits.sum()
    if batch.label.dim() == 1 and batch.weight is None and numbers_T is None and loss == BCE:
        return F.binary_cross_entropy_with_logits(logits, batch.label)
    label = batch.label.nan_to_num() if batch.label.dim() == 2 else batch.label
    losses = _losses(logits, label, numbers_T, loss)
    if losses.dim() == 2:  # several labels
        losses = losses.masked_fill(batch.label.isnan(), 0.0)
        losses = losses.sum(1) if task_weights_T is None else losses @ task_weights_T
    if batch.weight is None:
        return losses.mean()
    total = batch.weight.sum()
    return (losses * batch.weight).sum() / torch.where(total > 0, total, 1.0)


@dataclass(frozen=True, slots=True)
class _AllRows:
    """Rows of all ranks: scores with gradients, labels, weights and groups, each `[N]`."""

    score: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor
    group: torch.Tensor | None


def _gathered(logits: torch.Tensor, batch: Batch, group: comm.Group, by_group: bool) -> _AllRows:
    """
    Raises:
        ValueError: the rows should have groups, and have none.
    """
    if by_group and batch.group is None:
        raise ValueError("the loss compares the rows of a group; set schema.group")
    counts = comm.all_gather(torch.tensor([batch.rows], device=logits.device), group).flatten().tolist()
    weight = torch.ones_like(batch.label) if batch.weight is None else batch.weight
    label, weight = comm.gather_rows(torch.stack([batch.label, weight], dim=1), counts, group).unbind(1)
    groups = comm.all_gather_uneven(batch.group, group) if by_group and batch.group is not None else None
    return _AllRows(comm.gather_rows(logits.float()[:, None], counts, group)[:, 0], label, weight, groups)


def pairwise_loss(
    logits: torch.Tensor, batch: Batch, group: comm.Group = None, *, by_group: bool = False
) -> torch.Tensor:
    """Returns this rank's share of the pairwise loss (RankNet, Burges et al. 2005); the sum over ranks is the loss.

    The loss is the mean of `softplus(s_negative - s_positive)` over all pairs of a positive and a negative in the
    global batch, or in one of its groups, weighted by the product of their weights. Forward and backward are
    collective. Memory: one number for each pair of a positive of this rank and a negative of any rank.

    Args:
        logits: `[B]`.
        by_group: compare only rows of the same `batch.group`.
    """
    rows = _gathered(logits, batch, group, by_group)
    weight_B = torch.ones_like(batch.label) if batch.weight is None else batch.weight
    positive_B, positive_N = batch.label > 0.5, rows.label > 0.5
    weight_P, negative_weight = weight_B[positive_B], rows.weight[~positive_N]
    losses = F.softplus(rows.score[~positive_N] - logits.float()[positive_B, None])
    if rows.group is None or batch.group is None:
        total = rows.weight[positive_N].sum() * negative_weight.sum()
        summed = (losses * negative_weight).sum(1)
    else:
        pairs = (batch.group[positive_B, None] == rows.group[~positive_N]) * negative_weight
        total = comm.all_reduce((pairs.sum(1) * weight_P).sum(), group)
        summed = (losses * pairs).sum(1)
    return (summed * weight_P).sum() / torch.where(total > 0, total, 1.0)


def listnet_loss(
    logits: torch.Tensor, batch: Batch, group: comm.Group = None, *, by_group: bool = True
) -> torch.Tensor:
    """Returns this rank's share of ListNet's loss (Cao et al. 2007, top one); the sum over ranks is the loss.

    The mean over the groups with a positive label of `-Σ t log softmax(s)`, with t the label times the weight of a row,
    divided by the sum of these in its group. Forward and backward are collective.

    Args:
        logits: `[B]`.
    """
    rows = _gathered(logits, batch, group, by_group)
    assert rows.group is not None and batch.group is not None
    groups, index_N = rows.group.unique(return_inverse=True)
    top = rows.score.new_full((len(groups),), -math.inf)
    top = top.scatter_reduce(0, index_N, rows.score.detach(), "amax")
    sums = torch.zeros_like(top).index_add(0, index_N, (rows.score - top[index_N]).exp())
    totals = torch.zeros_like(top).index_add(0, index_N, rows.label * rows.weight)
    index_B = torch.searchsorted(groups, batch.group)
    weight_B = batch.label if batch.weight is None else batch.label * batch.weight
    losses = ((sums.log() + top)[index_B] - logits.float()) * weight_B / totals[index_B].clamp(min=1e-12)
    return losses.sum() / (totals > 0).sum().clamp(min=1)


def rank_mean(share: torch.Tensor, batch: Batch, group: comm.Group) -> torch.Tensor:
    """Converts a rank's share of a global loss to a mean over the rank's rows. Collective.

    The mean of these means, weighted by the ranks' row weights, is the global loss.
    """
    if batch.weight is None:
        rank_weight = torch.full((), float(batch.rows), device=share.device)
    else:
        rank_weight = batch.weight.sum(dtype=torch.float64).to(share.device, torch.float32)
    global_weight = comm.all_reduce(rank_weight.clone(), group)
    return torch.where(rank_weight > 0, share * global_weight / rank_weight.clamp(min=1e-30), share)


def _losses(
    outputs: torch.Tensor, label: torch.Tensor, numbers_T: torch.Tensor | None, loss: LossConfig
) -> torch.Tensor:
    """Returns the loss of each label of each row."""
    if isinstance(loss, Ziln):
        return ziln_losses(outputs, label)
    if numbers_T is None:
        return binary_losses(outputs, label, loss)
    numbers = number_losses(outputs, label, loss)
    if label.dim() == 1:
        return numbers
    return torch.where(numbers_T, numbers, binary_losses(outputs, label.masked_fill(numbers_T, 0.0), loss))
