"""Operators on jagged tensors, where fbgemm's own have limits."""

from __future__ import annotations

import pytest
import torch

from rayrec.sparse import ops


def test_chunks_of_more_numbers_than_fbgemm_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    sizes, data = torch.tensor([8, 0, 16, 4]), torch.arange(28.0)
    expected = torch.cat([data[8:24], data[:8], data[24:]])
    assert torch.equal(ops.permute_chunks(order, sizes, data), expected)
    monkeypatch.setattr(ops, "MAX_ELEMENTS", 27)
    with pytest.raises(ValueError, match="28 ids are more than one exchange takes"):
        ops.permute_chunks(order, sizes, data)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_empty_order_gives_an_empty_result(device: str) -> None:
    """On a GPU fbgemm's permute ops return their whole input for an empty order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    order = torch.empty(0, dtype=torch.int32, device=device)
    lengths_FB = torch.tensor([[1, 2], [0, 1]], dtype=torch.int32, device=device)
    values, weights = torch.arange(4, device=device), torch.rand(4, device=device)
    lengths, moved, moved_weights = ops.permute_segments(order, lengths_FB, values, weights, num_values=0)
    assert lengths.shape == (0, 2) and moved.numel() == 0
    assert moved_weights is not None and moved_weights.numel() == 0
    sizes = torch.tensor([1, 3], device=device)
    assert ops.permute_chunks(order, sizes, values).numel() == 0
    assert ops.permute_chunks(order, sizes, values, num_values=0).numel() == 0
