"""Calibration of an export: a map of logits, fitted on evaluation rows, after which probabilities match frequencies.

Both kinds are continuous, increasing and linear between knots, so that the order of scores, and the AUC, stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rayrec.metrics import LabelMetrics

F64 = npt.NDArray[np.float64]
KINDS = ("platt", "isotonic")
# "isotonic" counts positives in at most so many groups of equal weight, each of about so many rows.
GROUPS, GROUP_ROWS = 100, 20
_STEPS = 100


@dataclass(frozen=True, slots=True)
class Lines:
    """A map that is linear between K knots, which ascend: `intercepts[n] + slopes[n] * x` before knot n.

    Args:
        slopes, intercepts: K + 1 of each.
    """

    knots: Sequence[float]
    slopes: Sequence[float]
    intercepts: Sequence[float]


IDENTITY = Lines((), (1.0,), (0.0,))


class Calibration(nn.Module):
    """Maps logits `[B]`, or `[B, T]` of several labels."""

    def __init__(self, by_label: Sequence[Lines]) -> None:
        super().__init__()
        longest = max(len(lines.knots) for lines in by_label)

        def padded(values: Sequence[float], size: int, filling: float) -> list[float]:
            return [*values, *[filling] * (size - len(values))]

        knots = [padded(lines.knots, longest, math.inf) for lines in by_label]
        slopes = [padded(lines.slopes, longest + 1, 1.0) for lines in by_label]
        intercepts = [padded(lines.intercepts, longest + 1, 0.0) for lines in by_label]
        self.knots: torch.Tensor
        self.register_buffer("knots", torch.tensor(knots))
        self.slopes: torch.Tensor
        self.register_buffer("slopes", torch.tensor(slopes))
        self.intercepts: torch.Tensor
        self.register_buffer("intercepts", torch.tensor(intercepts))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        flat_BT = logits[:, None] if logits.dim() == 1 else logits
        segment_BT = (flat_BT[:, :, None] > self.knots).sum(2)
        label_T = torch.arange(self.knots.shape[0], device=logits.device)
        mapped_BT = self.intercepts[label_T, segment_BT] + self.slopes[label_T, segment_BT] * flat_BT
        return mapped_BT.view_as(logits)


def fit(kind: str, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, name: str) -> Lines:
    """Fits the map of a binary label.

    Args:
        kind: "platt": scale and shift, by the smallest log loss. "isotonic": increasing over `GROUPS` groups of rows.
        logits: `[B]`.
        labels: `[B]`; rows with NaN do not count.
        weights: `[B]`; None: all 1.
        name: Of the label.

    Raises:
        ValueError: The rows have only one class, or higher logits do not mean more positives.
    """
    known = ~labels.isnan() & (torch.ones_like(labels) if weights is None else weights).gt(0)
    x = logits[known].double().numpy()
    y = labels[known].double().numpy()
    w = np.ones_like(x) if weights is None else weights[known].double().numpy()
    positives, total = float((w * y).sum()), float(w.sum())
    if not 0 < positives < total:
        raise ValueError(
            f"--calibrate: label {name!r} has {positives:g} positives in {total:g} evaluation rows; it needs rows of "
            "both classes: give other rows with --data"
        )
    lines = _platt(x, y, w) if kind == "platt" else _isotonic(x, y, w)
    # Labels that fall with the logits pool into one group, which is only shifted.
    if min(lines.slopes) <= 0 or float(np.cov(x, y, aweights=w)[0, 1]) <= 0:
        raise ValueError(
            f"--calibrate: higher scores of label {name!r} do not mean more positives in the evaluation rows; check "
            "the labels, or export without calibration"
        )
    return lines


def _platt(x: F64, y: F64, w: F64) -> Lines:
    """Newton's method, with the targets of Platt (1999), which keep the scale finite for separable rows."""
    positives, negatives = float((w * y).sum()), float((w * (1 - y)).sum())
    target = np.where(y > 0.5, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    center, spread = float(np.average(x, weights=w)), float(np.sqrt(np.cov(x, aweights=w))) if len(x) > 1 else 0.0
    spread = spread or 1.0
    z = np.stack([(x - center) / spread, np.ones_like(x)])
    theta = np.array([spread, center])

    def loss(at: F64) -> float:
        logits = at @ z
        return float((w * (np.logaddexp(0, logits) - target * logits)).sum())

    for _ in range(_STEPS):
        p = _sigmoid(theta @ z)
        gradient = z @ (w * (p - target))
        hessian = (z * (w * p * (1 - p))) @ z.T + 1e-9 * w.sum() * np.eye(2)
        step, before, size = np.linalg.solve(hessian, gradient), loss(theta), 1.0
        while size > 1e-6 and loss(theta - size * step) > before:
            size /= 2
        theta = theta - size * step
        if float(np.abs(size * step).max()) < 1e-10:
            break
    slope = float(theta[0] / spread)
    return Lines((), (slope,), (float(theta[1] - slope * center),))


def _isotonic(x: F64, y: F64, w: F64) -> Lines:
    """Pools neighboring groups until their share of positives increases, and connects what is left by lines."""
    order = np.argsort(x, kind="stable")
    x, y, w = x[order], y[order], w[order]
    groups = min(max(len(x) // GROUP_ROWS, 1), GROUPS)
    group = np.minimum((w.cumsum() - w / 2) / w.sum() * groups, groups - 1).astype(np.int64)
    # Rows of one score are in one group.
    group = np.maximum.accumulate(np.where(np.diff(x, prepend=-np.inf) > 0, group, 0))
    _, group = np.unique(group, return_inverse=True)
    weight, place, positives = (np.bincount(group, values) for values in (w, w * x, w * y))
    blocks: list[F64] = []  # weight, sum of logits, weight of positives
    for one in np.stack([weight, place, positives], axis=1):
        blocks.append(one)
        while len(blocks) > 1 and blocks[-2][2] * blocks[-1][0] >= blocks[-1][2] * blocks[-2][0]:
            last = blocks.pop()
            blocks[-1] = blocks[-1] + last
    merged = np.stack(blocks)
    knots, share = merged[:, 1] / merged[:, 0], merged[:, 2] / merged[:, 0]
    # Only the first and the last block may have one class, whose logit is infinite: it counts one row of all more.
    rate, between = positives.sum() / weight.sum(), share[(share > 0) & (share < 1)]
    if share[0] == 0:
        share[0] = min([rate / (merged[0, 0] + 1), *(between[:1] / 2)])
    if share[-1] == 1:
        share[-1] = max([1 - (1 - rate) / (merged[-1, 0] + 1), *((1 + between[-1:]) / 2)])
    target = np.log(share) - np.log1p(-share)
    slopes = [1.0, *(np.diff(target) / np.diff(knots)), 1.0]  # beyond the ends, the logits are shifted
    anchors = [0, *range(len(knots))]
    intercepts = [target[at] - slope * knots[at] for at, slope in zip(anchors, slopes, strict=True)]
    segment = np.searchsorted(knots, x)
    mapped = np.array(intercepts)[segment] + np.array(slopes)[segment] * x
    shift = _shift(mapped, w, rate)  # lines between blocks have another mean than the blocks
    return Lines(knots.tolist(), [float(slope) for slope in slopes], [float(one + shift) for one in intercepts])


def _shift(logits: F64, w: F64, rate: float) -> float:
    """What added to the logits makes the mean probability `rate`."""
    low, high = -20.0, 20.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        below = float(np.average(_sigmoid(logits + middle), weights=w)) < rate
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _sigmoid(logits: F64) -> F64:
    return 1 / (1 + np.exp(-np.clip(logits, -500, 500)))


def calibrated(
    kind: str,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    names: Sequence[str],
    binary: Sequence[bool],
) -> tuple[Calibration, dict[str, dict[str, float | None]]]:
    """Fits the map of each binary label; numbers stay.

    Args:
        batches: Logits, labels and weights of rows.
        names: Of the labels.
        binary: Which labels are.

    Returns:
        The map; for each binary label, `logloss` and `ece` before and after it on these rows.

    Raises:
        ValueError: As `fit`, or there is no binary label.
    """
    if not any(binary):
        raise ValueError("--calibrate: the model predicts numbers, which have no probabilities; leave it out")
    logits = torch.cat([logits for logits, _, _ in batches]).float()
    labels = torch.cat([labels for _, labels, _ in batches]).float()
    given = [weights for _, _, weights in batches if weights is not None]
    weights = torch.cat(given) if given else None
    columns = list(range(len(names)))
    of_label = [(logits.view(len(logits), -1)[:, n], labels.view(len(labels), -1)[:, n]) for n in columns]
    module = Calibration([fit(kind, *of_label[n], weights, names[n]) if binary[n] else IDENTITY for n in columns])
    after = module(logits).view(len(logits), -1)
    changes: dict[str, dict[str, float | None]] = {}
    for n in columns:
        if binary[n]:
            changes[names[n]] = {}
            for side, values in (("before", of_label[n][0]), ("after", after[:, n])):
                metrics = LabelMetrics()
                metrics.update(values, of_label[n][1], weights)
                found = metrics.compute()
                changes[names[n]] |= {f"{metric}_{side}": found[metric] for metric in ("logloss", "ece")}
    return module, changes
