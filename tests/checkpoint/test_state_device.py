"""Where the state of a torch optimizer lies that is made from a checkpoint, before the optimizer's first step."""

from __future__ import annotations

import torch

from rayrec.checkpoint.contents import as_tensors, state_device
from rayrec.torchrec.optim import RowWiseAdagrad


def test_state_lies_beside_its_parameter_but_for_the_hosts_count_of_steps() -> None:
    """The meta device stands for a GPU; torch's own loading decides alike (`Optimizer.load_state_dict`)."""
    meta, host = torch.device("meta"), torch.device("cpu")
    rows = torch.nn.Parameter(torch.empty(4, 2, device=meta))
    assert state_device("sum", rows, RowWiseAdagrad([rows], lr=0.1)) == meta  # `[4]`: not shaped like the parameter
    adam = torch.optim.Adam([rows], lr=0.1)
    assert [state_device(key, rows, adam) for key in ("exp_avg", "step")] == [meta, host]
    assert state_device("step", rows, torch.optim.Adam([rows], lr=0.1, capturable=True)) == meta
    adam.param_groups[0]["fused"] = True
    assert state_device("step", rows, adam) == meta


def test_numbers_of_an_optimizer_are_saved_as_tensors() -> None:
    found = as_tensors({"step": 3, "rate": 0.5, "sum": torch.ones(2), "name": "x"})
    assert {key: (value.tolist(), value.dtype) for key, value in found.items()} == {
        "step": (3.0, torch.float64),
        "rate": (0.5, torch.float64),
        "sum": ([1.0, 1.0], torch.float32),
    }
