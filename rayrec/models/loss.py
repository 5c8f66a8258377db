"""Losses of rankers, and checks of settings that the models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a binary label. A label that is a number has the squared error.

    Args:
        kind: "bce" is binary cross-entropy; "focal" multiplies it by `(1 - p)^gamma`, with p the predicted probability
            of the observed label (Lin et al., "Focal loss for dense object detection", 2017); "mse" is the squared
            error of the probability; "pairwise" is `pairwise_loss`, for a single label.
        label_smoothing: moves each label by half of this value towards the other one.
        gamma: exponent of "focal".
        alpha: weight of positives in "focal"; negatives have 1 - alpha. None: 1 for both.
    """

    kind: Literal["bce", "focal", "mse", "pairwise"] = "bce"
    label_smoothing: float = 0.0
    gamma: float = 2.0
    alpha: float | None = None

    def __call__(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each logit; `logits` and `label` have the same shape."""
        target = label * (1 - self.label_smoothing) + self.label_smoothing / 2 if self.label_smoothing else label
        if self.kind == "mse":
            return (logits.sigmoid() - target).square()
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if self.kind == "bce":
            return losses
        losses = losses * torch.where(label > 0.5, -logits, logits).sigmoid() ** self.gamma
        return losses if self.alpha is None else losses * torch.where(label > 0.5, self.alpha, 1 - self.alpha)


BCE = Loss()


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
        self.loss = BCE  # `model.loss` of a config replaces it
        self._group: comm.Group = None

    def on_sharded(self, group: comm.Group) -> None:
        """Sets the ranks that the pairwise loss gathers; called when the tables are sharded over `group`."""
        self._group = group

    def forward(self, outputs_BT: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss, and logits `[B]`, or `[B, T]` with several labels. The logit of a number is its
        prediction.

        The loss is NaN in an export, which reads only the logits, and for "pairwise" outside training, as it would
        gather the rows of all ranks.
        """
        logits = outputs_BT.squeeze(1) if self._task_weights is None else outputs_BT
        if torch.compiler.is_exporting() or (self.loss.kind == "pairwise" and not self.training):
            return logits.new_full((), math.nan), logits
        if self.loss.kind == "pairwise":
            share = pairwise_loss(logits, batch, self._group)
            # `share * 0` keeps the collectives in the backward of a rank with an empty batch.
            return rank_mean(share, batch, self._group), logits + share * 0
        return mean_loss(logits, batch, self._task_weights, self._numbers, self.loss), logits


def mean_loss(
    logits: torch.Tensor,
    batch: Batch,
    task_weights_T: torch.Tensor | None = None,
    numbers_T: torch.Tensor | None = None,
    loss: Loss = BCE,
) -> torch.Tensor:
    """Weighted mean of the loss over the batch: Σ w loss / Σ w; the loss of a number is its squared error.

    With several labels, the loss of a row is the sum over its labels, weighted by `task_weights_T`. An unobserved label
    (NaN) adds 0, but its row still counts in Σ w. So the influence of a rare label is proportional to the rows that
    have it, and the mean over batches or ranks is the mean over all rows.

    Args:
        logits: `[B]` or `[B, T]`, the shape of the labels.
        task_weights_T: weight of each label; None: all 1.
        numbers_T: mask of the labels that are numbers; None: all are binary.
        loss: loss of the binary labels.

    Returns:
        A scalar; 0 with zero gradients if the batch is empty or all weights are 0.
    """
    if batch.rows == 0:
        return logits.sum()
    if batch.label.dim() == 1 and batch.weight is None and numbers_T is None and loss == BCE:
        return F.binary_cross_entropy_with_logits(logits, batch.label)
    label = batch.label.nan_to_num() if batch.label.dim() == 2 else batch.label
    losses = _losses(logits, label, numbers_T, loss)
    if losses.dim() == 2:
        losses = losses.masked_fill(batch.label.isnan(), 0.0)
        losses = losses.sum(1) if task_weights_T is None else losses @ task_weights_T
    if batch.weight is None:
        return losses.mean()
    total = batch.weight.sum()
    return (losses * batch.weight).sum() / torch.where(total > 0, total, 1.0)


def pairwise_loss(logits: torch.Tensor, batch: Batch, group: comm.Group = None) -> torch.Tensor:
    """Returns this rank's share of the pairwise loss (RankNet, Burges et al. 2005); the sum over ranks is the loss.

    The loss is the mean of `softplus(s_negative - s_positive)` over all pairs of a positive and a negative in the
    global batch, weighted by the product of their weights. Forward and backward are collective. Memory: one number for
    each pair of a positive of this rank and a negative of any rank.

    Args:
        logits: `[B]`.
    """
    weight_B = torch.ones_like(batch.label) if batch.weight is None else batch.weight
    counts = comm.all_gather(torch.tensor([batch.rows], device=logits.device), group).flatten().tolist()
    label_N, weight_N = comm.gather_rows(torch.stack([batch.label, weight_B], dim=1), counts, group).unbind(1)
    scores_N = comm.gather_rows(logits.float()[:, None], counts, group)[:, 0]
    positive_B, positive_N = batch.label > 0.5, label_N > 0.5
    total = weight_N[positive_N].sum() * weight_N[~positive_N].sum()
    losses = F.softplus(scores_N[~positive_N] - logits.float()[positive_B, None]) * weight_N[~positive_N]
    return (losses.sum(1) * weight_B[positive_B]).sum() / torch.where(total > 0, total, 1.0)


def rank_mean(share: torch.Tensor, batch: Batch, group: comm.Group) -> torch.Tensor:
    """Converts a rank's share of a global loss to a mean over the rank's rows. Collective.

    The mean of these means, weighted by the ranks' row weights, is the global loss.
    """
    rank_weight = torch.tensor(batch.total_weight, device=share.device)
    global_weight = comm.all_reduce(rank_weight.clone(), group)
    return share * global_weight / rank_weight if rank_weight > 0 else share


def _losses(logits: torch.Tensor, label: torch.Tensor, numbers_T: torch.Tensor | None, loss: Loss) -> torch.Tensor:
    """Returns the loss of each label of each row."""
    if numbers_T is None:
        return loss(logits, label)
    squares = (logits - label).square()
    if label.dim() == 1:
        return squares
    binary = loss(logits, label.masked_fill(numbers_T, 0.0))
    return torch.where(numbers_T, squares, binary)
