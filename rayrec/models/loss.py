"""Shared by the models: checks of settings, and the loss."""

from __future__ import annotations

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
    """The tables' one `embedding_dim`.

    Raises:
        ValueError: no tables, or tables of different widths, named.
    """
    dims = {table.name: table.embedding_dim for table in tables}
    if len(set(dims.values())) != 1:
        raise ValueError(f"{model}: all tables need one embedding_dim; there are {dims}")
    return next(iter(dims.values()))


def check_logits(model: str, setting: str, sizes: Sequence[int], task_weights: Sequence[float] | None) -> None:
    """Raises ValueError where layer widths do not end with the logit, or with the logits of several labels."""
    wanted = 1 if task_weights is None else len(task_weights)
    if not sizes or sizes[-1] != wanted:
        what = "the logit" if task_weights is None else "one logit a label"
        raise ValueError(f"{model}: {setting}={list(sizes)} must end with {wanted}, {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a binary label. One that is a number has squared error.

    Args:
        kind: "bce" is binary cross-entropy; "focal" is that times `(1 - p)^gamma`, p the probability of the label that
            is there (Lin et al., "Focal loss for dense object detection", 2017); "mse" is the squared error of the
            probability; "pairwise" is `pairwise_loss`, of a head with one label.
        label_smoothing: labels are moved by half of it towards the other one.
        gamma: of "focal".
        alpha: of "focal": weight of the positives, 1 - alpha that of the negatives; None: 1 for both.
    """

    kind: Literal["bce", "focal", "mse", "pairwise"] = "bce"
    label_smoothing: float = 0.0
    gamma: float = 2.0
    alpha: float | None = None

    def __call__(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """The loss of each logit, of the shape of both."""
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
    """After a model's last layer: reshapes the logits and computes the loss.

    Args:
        task_weights: of several labels' losses; None for one label.
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
        self.loss = BCE  # `model.loss` of a config sets another one
        self._group: comm.Group = None

    def on_sharded(self, group: comm.Group) -> None:
        """Called when the tables are sharded over `group`."""
        self._group = group

    def forward(self, outputs_BT: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B]`, or `[B, T]` of several labels); the logit of a number is its prediction."""
        logits = outputs_BT.squeeze(1) if self._task_weights is None else outputs_BT
        if self.loss.kind == "pairwise":
            part = pairwise_loss(logits, batch, self._group)
            return own_mean(part, batch, self._group), logits + part * 0  # an empty batch's backward exchanges, too
        return mean_loss(logits, batch, self._task_weights, self._numbers, self.loss), logits


def mean_loss(
    logits: torch.Tensor,
    batch: Batch,
    task_weights_T: torch.Tensor | None = None,
    numbers_T: torch.Tensor | None = None,
    loss: Loss = BCE,
) -> torch.Tensor:
    """The loss, or squared error for numbers, averaged over the batch with its weights: Σ w loss / Σ w.

    With several labels, a row's loss is the sum over its labels, weighted by `task_weights_T`. An unobserved label
    (NaN) adds nothing, but its row still counts in Σ w: so a rare label weighs as much as the rows that have it, and
    the mean over batches or ranks is the mean over all their rows.

    Args:
        logits: `[B]`, or `[B, T]` as the batch's labels.
        task_weights_T: None: all 1.
        numbers_T: which labels are numbers; None: none of them.
        loss: of the other ones.

    Returns:
        a scalar; 0, with zero gradients, for an empty batch or weights that are all 0.
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
    """This rank's part of the pairwise loss of all ranks' rows: `softplus(s_negative - s_positive)`, averaged over all
    pairs of a positive and a negative of the step, by the product of their weights (RankNet, Burges et al. 2005).

    The sum over ranks is the loss; every rank calls it, and its backward. It holds a number for each pair of an own
    positive and a negative of any rank.

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


def own_mean(part: torch.Tensor, batch: Batch, group: comm.Group) -> torch.Tensor:
    """A rank's part of a loss of all ranks, as a mean of its own rows: such means, weighed by the ranks' shares of all
    rows' weights, add up to the loss. Collective."""
    own = torch.tensor(batch.total_weight, device=part.device)
    everywhere = comm.all_reduce(own.clone(), group)
    return part * everywhere / own if own > 0 else part


def _losses(logits: torch.Tensor, label: torch.Tensor, numbers_T: torch.Tensor | None, loss: Loss) -> torch.Tensor:
    """The loss of each label of each row."""
    if numbers_T is None:
        return loss(logits, label)
    squares = (logits - label).square()
    if label.dim() == 1:
        return squares
    binary = loss(logits, label.masked_fill(numbers_T, 0.0))
    return torch.where(numbers_T, squares, binary)
