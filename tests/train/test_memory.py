"""A run whose memory runs out says what had taken it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train.worker.memory import OutOfMemory, is_out_of_memory, memory_use, out_of_memory
from tests.train.small import fit_job, learner_of, make_job, raw_config, write_all

TOO_MUCH = 1 << 60


class Grows(nn.Module):
    """DLRM that asks for more memory than there is, in the given step (the first is 0)."""

    def __init__(self, step: int, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.step, self.steps = DLRM(**arguments), step, 0

    def forward(self, batch: Batch) -> Any:
        if self.steps == self.step:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        self.steps += self.training
        return self.inner(batch)


def test_the_tables_and_what_is_free_are_named(tmp_path: Path) -> None:
    raw = raw_config(write_all(tmp_path, rows=300), storage__path=str(tmp_path / "run"))
    job = replace(make_job(raw), factory=partial(Grows, 3))
    with pytest.raises(OutOfMemory) as caught:
        fit_job(job)
    text = str(caught.value)
    assert text.startswith("rank 0 is out of memory: ") and f"{TOO_MUCH}" in text
    for table in job.config.tables:
        assert f"{table.name} " in text
    tables = sum(4 * table.rows * table.dim for table in job.config.tables)
    assert f"{len(job.config.tables)} tables" in text and tables < 1 << 20 and " KiB (" in text
    assert re.search(r"activations and the rest [\d.]+ [MG]iB; its host has [\d.]+ [MG]iB of [\d.]+ [MGT]iB free", text)
    assert "trainer.batch_size" in text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_largest_tables_are_named_first_with_their_optimizer_states(tmp_path: Path) -> None:
    raw = raw_config(write_all(tmp_path, rows=10))
    raw["tables"] = [
        {"name": f"t{place}", "rows": 10_000 * place, "dim": 8, "features": ["user", "item", "tags"]}
        for place in (1, 6, 3, 2, 5, 4)
    ]
    learner = learner_of(make_job(raw))
    # Row-wise: a number beside each row, so table `t1` has 10,000 × (8 + 1) × 4 bytes.
    named = "t6 2.1 MiB, t5 1.7 MiB, t4 1.4 MiB, t3 1.0 MiB, t2 703.1 KiB"
    text = memory_use(learner, torch.device("cpu")).replace("embedding_bags.embedding_bags.", "")
    assert text.startswith(f"6 tables with optimizer state use 7.2 MiB ({named}), ")


def test_tables_that_do_not_fit_are_told_before_there_is_a_model() -> None:
    text = str(out_of_memory(MemoryError(), None, torch.device("cpu"), 3))
    assert text.startswith("rank 3 is out of memory: the model was being built") and text.endswith("(MemoryError)")


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (ValueError("DefaultCPUAllocator"), False),
        (RuntimeError("out of range"), False),
        (OSError(28, "No space left"), False),
    ],
)
def test_only_memory_counts(error: BaseException, wanted: bool) -> None:
    assert is_out_of_memory(error) is wanted
