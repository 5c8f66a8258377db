"""`BinaryMetrics`: quality of the predictions of a binary classifier, over any number of batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.distributed.comm import all_reduce
from rayrec.metrics.histogram import LogitBins, binned_auc, binned_auprc

if TYPE_CHECKING:
    import torch.distributed as dist


TOTALS = 5  # weighted log loss (nats), predicted probabilities, examples, squared and absolute error


class _Sums(torch.nn.Module):
    """The sums that every metric of T labels follows from; they add up over batches and ranks.

    Sums of weights that are whole numbers are exact up to 2**53.
    """

    counts: torch.Tensor  # float64 [T, 2, bins]: weight of the examples by label and by bin of their logit
    totals: torch.Tensor  # float64 [T, TOTALS]
    first_cell: torch.Tensor  # int64 [T]: where each label's counts start

    def __init__(self, num_labels: int, bins: LogitBins, may_be_unseen: bool) -> None:
        super().__init__()
        self.bins, self.may_be_unseen = bins, may_be_unseen
        self.register_buffer("counts", torch.zeros(num_labels, 2, bins.count, dtype=torch.float64))
        self.register_buffer("totals", torch.zeros(num_labels, TOTALS, dtype=torch.float64))
        self.register_buffer("first_cell", torch.arange(num_labels) * 2 * bins.count, persistent=False)

    def reset(self) -> None:
        self.counts.zero_()
        self.totals.zero_()

    def update(self, logits_BT: torch.Tensor, labels_BT: torch.Tensor, weights_B: torch.Tensor | None) -> None:
        logits_BT, labels_BT = logits_BT.detach().double(), labels_BT.detach().double()
        weights_BT = torch.ones_like(logits_BT) if weights_B is None else weights_B.detach().double()[:, None]
        rows_T = torch.full_like(self.totals[:, 0], len(logits_BT))
        if self.may_be_unseen:
            seen_BT = (~labels_BT.isnan()).double()
            labels_BT, weights_BT, rows_T = labels_BT.nan_to_num(), weights_BT * seen_BT, seen_BT.sum(0)
        cell_BT = (labels_BT > 0.5).long() * self.bins.count + self.bins.index(logits_BT)
        cell_BT += self.first_cell
        self.counts.view(-1).scatter_add_(0, cell_BT.view(-1), weights_BT.reshape(-1))
        loss_BT = binary_cross_entropy_with_logits(logits_BT, labels_BT, weights_BT, reduction="none")
        predicted_BT = torch.sigmoid(logits_BT)
        error_BT = (predicted_BT - labels_BT).abs_()
        sums = [loss_BT.sum(0), (predicted_BT * weights_BT).sum(0), rows_T]
        sums += [(error_BT.square() * weights_BT).sum(0), (error_BT * weights_BT).sum(0)]
        self.totals += torch.stack(sums, dim=1)


class BinaryMetrics:
    """Metrics of a two-class model that outputs logits, accumulated over batches and ranks in bounded memory.

    `compute` gives:

    - `auc`: area under the ROC curve, from a histogram of the logits (see `LogitBins`); `auc_error_bound` says how far
      it can be from the exact area. Within 1e-5 of it for ordinary models, typically 1e-7.
    - `ne`: normalized entropy, the log loss over that of always predicting the base rate (He et al., "Practical lessons
      from predicting clicks on ads at Facebook", 2014). Below 1 is better than no model.
    - `logloss`: mean log loss, in nats.
    - `calibration`: sum of predictions over sum of labels; 1 is calibrated.
    - `samples`: examples seen.
    - `auprc`: area under the precision-recall curve (average precision), from the same histogram.
    - `accuracy`, `precision`, `recall`: of calling an example positive from a probability of 0.5 on; exact.
    - `ctr`: the share of positives. `mse`, `mae`: mean squared and absolute error of the probabilities.
    - `tasks`, for a model with several labels: all of the above for each label, by name; the first label's stand above.

    With weights, every sum over examples is weighted: an example of weight 2 counts twice. Only `samples` is not
    weighted. With several labels, NaN means not observed: the example does not count for that label.

    A figure that is not defined is None: all if no example has a weight above 0; `auc` and `ne` (and, without a
    positive, `calibration`) if all labels are equal; `logloss` and what depends on it once a logit was not finite.

    Args:
        device: where the state lives (1 MiB a label); that of the logits avoids copies.
        bins: how logits are binned for the AUC.
        names: of T labels, for a model with several; None for one label.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        bins: LogitBins | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = names
        sums = _Sums(1 if names is None else len(names), bins or LogitBins(), may_be_unseen=names is not None)
        self._sums = sums.to(device or torch.device("cpu"))

    def update(self, logits: torch.Tensor, labels: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds a batch; never waits for the device.

        Args:
            logits: floating [B], or [B, T] with several labels; B may be 0.
            labels: of the same shape, each 0 or 1, or NaN where a label was not observed.
            weights_B: [B], each finite and at least 0; None: all 1.

        Raises:
            ValueError: the shapes are not these.
        """
        wanted = "[B]" if self._names is None else f"[B, {len(self._names)}]"
        tail = () if self._names is None else (len(self._names),)
        if logits.shape != labels.shape or logits.dim() < 1 or logits.shape[1:] != tail:
            raise ValueError(
                f"logits {list(logits.shape)} and labels {list(labels.shape)} must both be of shape {wanted}"
                + ("; squeeze the last dimension of a [B, 1] output" if self._names is None else "")
            )
        if weights_B is not None and weights_B.shape != labels.shape[:1]:
            raise ValueError(f"weights {list(weights_B.shape)} must be [B], as labels {list(labels.shape)} have B rows")
        device, shape = self._sums.counts.device, (len(labels), self._sums.counts.shape[0])
        weights_B = None if weights_B is None else weights_B.to(device)
        self._sums.update(logits.to(device).reshape(shape), labels.to(device).reshape(shape), weights_B)

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The metrics of all that was added since the last `reset`.

        Args:
            group: sums over its ranks, each of which must call this, at the cost of one all-reduce; None for what
                this process saw alone.
        """
        state = self.state(group)
        figures = [_figures(*of_label) for of_label in zip(state["counts"], state["totals"], strict=True)]
        if self._names is None:
            return figures[0]
        return {**figures[0], "tasks": dict(zip(self._names, figures, strict=True))}

    def auc_error_bound(self, group: dist.ProcessGroup | None = None) -> float | None:
        """How far `auc` can be from the exact area; None where it is not defined. Collective like `compute`."""
        counts = self.state(group)["counts"][0]
        area = binned_auc(counts[0], counts[1])
        return area[1] if area else None

    def reset(self) -> None:
        """Forgets every batch."""
        self._sums.reset()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU, for a checkpoint: `counts` [T, 2, bins], `totals` [T, 5], both float64.

        States add up: that of a run is the sum over its ranks. With a `group` it is that sum (collective like
        `compute`), and belongs to one rank of the resumed run, whatever the number of ranks; the others start empty.
        """
        counts, totals = self._sums.counts, self._sums.totals
        if group is None:
            return {"counts": counts.cpu().clone(), "totals": totals.cpu().clone()}
        packed = all_reduce(torch.cat((totals.view(-1), counts.view(-1))), group).cpu()  # one collective for both
        first, rest = packed.split([totals.numel(), counts.numel()])
        return {"counts": rest.view_as(counts), "totals": first.view_as(totals).clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by one that `state` gave.

        Raises:
            ValueError: it is not such a state, or was made with another number of labels or bins.
        """
        own = {"counts": self._sums.counts, "totals": self._sums.totals}
        if set(state) != set(own):
            raise ValueError(f"metrics state has {sorted(state)}; expected {sorted(own)}")
        for name, current in own.items():
            if state[name].shape != current.shape:
                raise ValueError(
                    f"metrics state {name!r} has shape {list(state[name].shape)}, this one {list(current.shape)}: "
                    "make BinaryMetrics with the same bins and labels"
                )
            setattr(self._sums, name, state[name].to(current.device, current.dtype, copy=True))


def _figures(counts: torch.Tensor, totals: torch.Tensor) -> dict[str, float | int | None]:
    """The metrics that counts [2, bins] and totals [5] stand for, as `BinaryMetrics.compute` documents them."""
    negatives, positives = (float(weight) for weight in counts.sum(1))
    weight = negatives + positives
    loss_sum, prediction_sum, samples, squares, absolutes = (float(total) for total in totals)
    sound = weight > 0 and math.isfinite(loss_sum)
    logloss = loss_sum / weight if sound else None
    base_entropy = _entropy(positives / weight) if weight else 0.0
    area = binned_auc(counts[0], counts[1]) if sound else None
    return {
        "auc": area[0] if area else None,
        "ne": logloss / base_entropy if logloss is not None and base_entropy else None,
        "logloss": logloss,
        "calibration": prediction_sum / positives if sound and positives else None,
        "samples": int(samples),
        "auprc": binned_auprc(counts[0], counts[1]) if sound else None,
        **_at_half(counts, weight if sound else 0.0),
        "ctr": positives / weight if sound else None,
        "mse": squares / weight if sound else None,
        "mae": absolutes / weight if sound else None,
    }


def _at_half(counts: torch.Tensor, weight: float) -> dict[str, float | None]:
    """Of calling an example positive from a probability of 0.5 on, which is where a bin starts: exact."""
    middle = counts.shape[1] // 2
    (below, above), (missed, found) = ((float(c[:middle].sum()), float(c[middle:].sum())) for c in counts)
    return {
        "accuracy": (below + found) / weight if weight else None,
        "precision": found / (found + above) if weight and found + above else None,
        "recall": found / (found + missed) if weight and found + missed else None,
    }


def _entropy(rate: float) -> float:
    """Entropy of a Bernoulli variable with probability `rate`, in nats."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
