"""`GroupedAuc`: ranking quality inside each group of samples, for example of one user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.distributed.comm import all_gather_object, all_reduce, all_to_all

if TYPE_CHECKING:
    import torch.distributed as dist

F64 = npt.NDArray[np.float64]
_SPREAD = -7046029254386353131  # golden ratio as int64: spreads consecutive ids over ranks


class GroupedAuc:
    """Mean AUC of groups, weighted by their impressions (GAUC; Zhu et al., "Optimized cost per click in
    Taobao display advertising", KDD 2017, section 5.1).

    A group with equal labels has no AUC and is excluded, including its weight. With sample weights, impressions and
    pairs are weighted. The result is exact: rows are kept (12 bytes each, plus 8 per label), and `compute` sends each
    group's rows to one rank.

    Also computes NDCG@k (Järvelin & Kekäläinen 2002, gains 0 and 1) and recall@k, averaged without weights over groups
    with a positive. Among equal logits, negatives come first.

    Args:
        names: Names of T labels. None for one label.
        k: Cutoff of NDCG and recall.
    """

    def __init__(self, names: Sequence[str] | None = None, k: int = 10) -> None:
        self._names, self._k = names, k
        self._width = 1 + 2 * (1 if names is None else len(names))
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(
        self, keys_B: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weights_B: torch.Tensor | None = None
    ) -> None:
        """Adds a batch and copies it to the CPU.

        Args:
            keys_B: int64 [B], the group of each row.
            logits, labels: [B], or [B, T] with several labels. A label is 0, 1, or NaN if it was not observed.
            weights_B: [B], finite and at least 0. Default: all 1.
        """
        rows = len(keys_B)
        weights_B = torch.ones(rows) if weights_B is None else weights_B
        shape = (rows, self._width // 2)
        columns = (weights_B.reshape(rows, 1), logits.detach().reshape(shape), labels.reshape(shape))
        self._keys.append(keys_B.cpu())
        self._values.append(torch.cat([column.float().cpu() for column in columns], dim=1))

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """Returns `gauc`, `groups` (number of groups with both labels), `ndcg@k` and `recall@k`.

        With several labels these are the metrics of the first label, and `tasks` has the metrics of each, by name.
        `gauc` is None without a group with both labels, or if a logit is not finite.

        Args:
            group: gloo group of the ranks to combine; every rank must call this. None for this process alone.
        """
        keys, values = self._gathered(group)
        weights, logits, labels = values[:, 0], *np.split(values[:, 1:], 2, axis=1)
        columns = [(keys, logits[:, t], labels[:, t], weights) for t in range(logits.shape[1])]
        sums = [(*_sums(*column), *_top_k_sums(*column, self._k)) for column in columns]
        metrics: list[dict[str, Any]] = []
        for total, impressions, groups, *top_k_sums in all_reduce(
            torch.tensor(sums, dtype=torch.float64), group
        ).tolist():
            defined = impressions > 0 and np.isfinite(total)
            metrics.append({"gauc": total / impressions if defined else None, "groups": int(groups)})
            ndcg, recall, num_groups = top_k_sums
            has_groups = num_groups > 0 and np.isfinite(total)
            metrics[-1][f"ndcg@{self._k}"] = ndcg / num_groups if has_groups else None
            metrics[-1][f"recall@{self._k}"] = recall / num_groups if has_groups else None
        if self._names is None:
            return metrics[0]
        return {**metrics[0], "tasks": dict(zip(self._names, metrics, strict=True))}

    def _gathered(self, group: dist.ProcessGroup | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """All rows of this rank's groups."""
        keys = torch.cat([torch.empty(0, dtype=torch.int64), *self._keys])
        values = torch.cat([torch.empty(0, self._width), *self._values])
        if group is not None and group.size() > 1:
            owner = ((keys * _SPREAD) >> 32) % group.size()
            order = owner.argsort()
            sent = owner.bincount(minlength=group.size()).tolist()
            received = [counts[group.rank()] for counts in all_gather_object(sent, group)]
            keys = _exchanged(keys[order], sent, received, group)
            values = _exchanged(values[order], sent, received, group)
        return keys.numpy(), values.numpy()


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received_rows = rows.new_empty(sum(received), *rows.shape[1:])
    all_to_all(received_rows, rows, received, sent, group)()
    return received_rows


def _sums(
    keys: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
) -> tuple[float, float, int]:
    """(Σ impressions × AUC, Σ impressions, groups) over groups with both labels."""
    seen = ~np.isnan(labels) & (weights > 0)
    if not seen.any():
        return 0.0, 0.0, 0
    if not np.isfinite(logits[seen]).all():
        return float("nan"), 0.0, 0
    order = np.lexsort((logits[seen], keys[seen]))
    keys, logits, weight = keys[seen][order], logits[seen][order], weights[seen][order].astype(np.float64)
    positive = weight * (labels[seen][order] > 0.5)
    new_group = np.concatenate(([True], keys[1:] != keys[:-1]))
    # A tie is a run of equal logits in a group. Its pairs count half.
    ties = np.flatnonzero(new_group | np.concatenate(([True], logits[1:] != logits[:-1])))
    groups = np.flatnonzero(new_group[ties])
    positives, negatives = np.add.reduceat(positive, ties), np.add.reduceat(weight - positive, ties)
    lengths = np.diff(np.append(groups, len(ties)))
    below = np.cumsum(negatives) - negatives
    below -= np.repeat(below[groups], lengths)
    won: F64 = np.add.reduceat(positives * (below + negatives / 2), groups)
    all_positives, all_negatives = np.add.reduceat(positives, groups), np.add.reduceat(negatives, groups)
    has_both = (all_positives > 0) & (all_negatives > 0)
    impressions = (all_positives + all_negatives)[has_both]
    areas = won[has_both] / (all_positives * all_negatives)[has_both]
    return float(areas @ impressions), float(impressions.sum()), int(has_both.sum())


def _top_k_sums(
    keys: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    k: int,
) -> tuple[float, float, int]:
    """(Σ NDCG@k, Σ recall@k, groups) over groups with a positive."""
    seen = ~np.isnan(labels) & (weights > 0)
    if not seen.any() or not np.isfinite(logits[seen]).all():
        return 0.0, 0.0, 0
    positive = labels[seen] > 0.5
    order = np.lexsort((positive, -logits[seen], keys[seen]))
    keys, positive = keys[seen][order], positive[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    position = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    gain: F64 = np.where(position < k, 1 / np.log2(position + 2), 0.0)
    totals = np.add.reduceat(positive.astype(np.int64), starts)
    dcg = np.add.reduceat(gain * positive, starts)
    hits = np.add.reduceat((positive & (position < k)).astype(np.float64), starts)
    ideal = np.concatenate(([0.0], np.cumsum(1 / np.log2(np.arange(k) + 2))))[np.minimum(totals, k)]
    has_positive = totals > 0
    return (
        float((dcg[has_positive] / ideal[has_positive]).sum()),
        float((hits[has_positive] / totals[has_positive]).sum()),
        int(has_positive.sum()),
    )
