"""`BinaryMetrics`: how good the predictions of a two-class model are, over any number of batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torchmetrics
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.distributed.comm import all_reduce
from rayrec.metrics.histogram import LogitBins, binned_auc

if TYPE_CHECKING:
    import torch.distributed as dist


class _Sums(torchmetrics.Metric):
    """The sums that every metric here follows from; they add up over batches and ranks."""

    full_state_update = False
    counts: torch.Tensor  # int64 [2, bins]: examples by label and by bin of their logit
    totals: torch.Tensor  # float64 [2]: of the examples' log loss (nats), of their predicted probabilities

    def __init__(self, bins: LogitBins) -> None:
        super().__init__(sync_on_compute=False)  # ranks are summed by BinaryMetrics, through rayrec's own collectives
        self.bins = bins
        self.add_state("counts", torch.zeros(2, bins.count, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("totals", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> None:
        logits_B, labels_B = logits_B.detach().double(), labels_B.detach().double()
        cell_B = (labels_B > 0.5).long() * self.bins.count + self.bins.index(logits_B)
        self.counts.view(-1).scatter_add_(0, cell_B, torch.ones_like(cell_B))
        loss = binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum")
        self.totals += torch.stack((loss, torch.sigmoid(logits_B).sum()))

    def compute(self) -> dict[str, float | int | None]:
        return _figures(self.counts, self.totals)


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

    A figure that is not defined is None: all where there is no example, `auc`, `ne` (and, without a positive,
    `calibration`) where all labels are alike, `logloss` and what depends on it once a logit was not finite.

    Args:
        device: where the state lives (1 MiB); that of the logits avoids copies.
        bins: how logits are binned for the AUC.
    """

    def __init__(self, device: torch.device | str | None = None, bins: LogitBins | None = None) -> None:
        self._sums = _Sums(bins or LogitBins()).to(device or torch.device("cpu"))

    def update(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> None:
        """Adds a batch; never waits for the device.

        Args:
            logits_B: floating [B]; B may be 0.
            labels_B: [B], each 0 or 1.

        Raises:
            ValueError: the shapes differ or are not [B].
        """
        if logits_B.dim() != 1 or logits_B.shape != labels_B.shape:
            raise ValueError(
                f"logits {list(logits_B.shape)} and labels {list(labels_B.shape)} must both be of shape [B]; "
                "squeeze the last dimension of a [B, 1] output"
            )
        device = self._sums.counts.device
        self._sums.update(logits_B.to(device), labels_B.to(device))

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, float | int | None]:
        """The metrics of all that was added since the last `reset`.

        Args:
            group: sums over its ranks, each of which must call this, at the cost of one all-reduce; None for what
                this process saw alone.
        """
        state = self.state(group)
        return _figures(state["counts"], state["totals"])

    def auc_error_bound(self, group: dist.ProcessGroup | None = None) -> float | None:
        """How far `auc` can be from the exact area; None where it is not defined. Collective like `compute`."""
        counts = self.state(group)["counts"].double()
        area = binned_auc(counts[0], counts[1])
        return area[1] if area else None

    def reset(self) -> None:
        """Forgets every batch."""
        self._sums.reset()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU, for a checkpoint: `counts` int64 [2, bins], `totals` float64 [2].

        States add up: that of a run is the sum over its ranks. With a `group` it is that sum (collective like
        `compute`), and belongs to one rank of the resumed run, whatever the number of ranks; the others start empty.
        """
        counts, totals = self._sums.counts, self._sums.totals
        if group is None:
            return {"counts": counts.cpu().clone(), "totals": totals.cpu().clone()}
        # One collective for both; float64 holds counts exactly up to 2**53.
        packed = all_reduce(torch.cat((totals, counts.view(-1).double())), group).cpu()
        return {"counts": packed[2:].long().view_as(counts), "totals": packed[:2].clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by one that `state` gave.

        Raises:
            ValueError: it is not such a state, or was made with another number of bins.
        """
        own = {"counts": self._sums.counts, "totals": self._sums.totals}
        if set(state) != set(own):
            raise ValueError(f"metrics state has {sorted(state)}; expected {sorted(own)}")
        for name, current in own.items():
            if state[name].shape != current.shape:
                raise ValueError(
                    f"metrics state {name!r} has shape {list(state[name].shape)}, this one {list(current.shape)}: "
                    "make BinaryMetrics with the same bins"
                )
            setattr(self._sums, name, state[name].to(current.device, current.dtype, copy=True))


def _figures(counts: torch.Tensor, totals: torch.Tensor) -> dict[str, float | int | None]:
    """The metrics that counts [2, bins] and totals [2] stand for, as `BinaryMetrics.compute` documents them."""
    histogram = counts.double()
    negatives, positives = (int(count) for count in counts.sum(1))
    samples = negatives + positives
    loss_sum, prediction_sum = (float(total) for total in totals)
    sound = samples > 0 and math.isfinite(loss_sum)
    logloss = loss_sum / samples if sound else None
    base_entropy = _entropy(positives / samples) if samples else 0.0
    area = binned_auc(histogram[0], histogram[1]) if sound else None
    return {
        "auc": area[0] if area else None,
        "ne": logloss / base_entropy if logloss is not None and base_entropy else None,
        "logloss": logloss,
        "calibration": prediction_sum / positives if sound and positives else None,
        "samples": samples,
    }


def _entropy(rate: float) -> float:
    """Of a coin that comes up with probability `rate`, in nats."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
