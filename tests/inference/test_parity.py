"""The proof of an export: what it says of scores and of time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rayrec.inference import Inputs, parity
from rayrec.inference.parity import ParityLimits, compare
from rayrec.models import Batch
from rayrec.quant import TableFormat
from rayrec.sparse import KeyedJaggedTensor

INPUTS = Inputs(keys=(), num_dense=1, labels=None, weighted=False)
NO_IDS = torch.empty(0, dtype=torch.int64)


def batches(logits: torch.Tensor, size: int) -> Iterator[Batch]:
    """Rows whose only dense number is their logit."""
    label = (torch.arange(len(logits)) % 3 == 0).float()
    for start in range(0, len(logits), size):
        rows = logits[start : start + size, None]
        sparse = KeyedJaggedTensor([], NO_IDS, lengths=NO_IDS, stride=len(rows))
        yield Batch(rows, sparse, label[start : start + size])


def score(batch: Batch) -> torch.Tensor:
    return batch.dense[:, 0]


def quantiles(logits: torch.Tensor, size: int) -> list[float]:
    found = compare(score, score, batches(logits, size), INPUTS, ParityLimits(None, 1.0), {})
    return found.quantiles["label"]


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_quantiles_are_those_of_all_rows_however_they_are_ordered_and_batched(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Rows in the order of time, whose scores rise: a sample of the first ones would know no high scores."""
    monkeypatch.setattr(parity, "SAMPLE_ROWS", 1000)
    logits = torch.linspace(-4, 4, 6000)
    found = quantiles(logits, size)
    expected = np.quantile(torch.sigmoid(logits).numpy(), np.linspace(0, 1, 11))
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert found == quantiles(logits, 512), "the same rows give the same sample"


def test_quantiles_of_few_rows_are_exact() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    expected = np.quantile(torch.sigmoid(logits.double()).numpy(), np.linspace(0, 1, 11))
    np.testing.assert_allclose(quantiles(logits, 100), expected, atol=1e-12)


def test_layers_that_are_narrow_for_speed_must_be_faster() -> None:
    def slowly(batch: Batch) -> torch.Tensor:
        time.sleep(0.003)
        return score(batch)

    limits = ParityLimits.of([TableFormat.INT8], "bf16")
    found = compare(score, slowly, batches(torch.zeros(40), 8), INPUTS, limits, {})
    assert found.slow is not None and found.slow.startswith("slower than as trained") and not found.problems
    assert compare(slowly, score, batches(torch.zeros(40), 8), INPUTS, limits, {}).slow is None
    narrow_tables = ParityLimits.of([TableFormat.INT8], "fp32")  # for memory
    assert compare(score, slowly, batches(torch.zeros(40), 8), INPUTS, narrow_tables, {}).slow is None
