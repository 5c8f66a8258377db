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
