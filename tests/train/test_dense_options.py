"""Options of the dense part: products in bfloat16, compiled layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, learner_of, make_job, raw_config, write_all
from tests.train.test_loop import batches


@pytest.mark.parametrize("parts", [1, 2])
def test_products_are_bf16_in_training_and_all_else_is_fp32(tmp_path: Path, parts: int) -> None:
    write_all(tmp_path, rows=64)
    found = {}
    for precision in ("fp32", "bf16"):
        raw = raw_config(tmp_path, trainer__dense_precision=precision, trainer__micro_batches=parts)
        learner = learner_of(make_job(raw))
        batch = batches([32], 1)[0]
        before = learner.score(batch)
        loss, logits = learner.step(batch, 1.0)
        assert {p.dtype for p in learner.model.parameters()} == {torch.float32} == {learner.score(batch).dtype}
        assert all(p.grad.dtype == torch.float32 for p in learner.model.other_parameters().values())
        found[precision] = (before, loss.float(), logits, learner.gradient_norm())
    (same, loss, _, norm), (other, loss_16, logits_16, norm_16) = found["fp32"], found["bf16"]
    assert torch.equal(same, other), "scores are fp32"
    assert logits_16.dtype == torch.bfloat16
    assert loss != loss_16 and float(loss_16) == pytest.approx(float(loss), rel=0.02)
    assert norm_16 == pytest.approx(norm, rel=0.05)


def test_two_ranks_train_in_bf16_as_well_as_in_fp32(tmp_path: Path) -> None:
    write_all(tmp_path)
    auc = []
    for precision in ("fp32", "bf16"):
        raw = raw_config(tmp_path, name=precision, trainer__dense_precision=precision, trainer__epochs=4)
        auc.append(on_ranks(2, fit_on_rank, raw)[0]["eval"]["auc"])
    assert auc[0] > 0.75 and auc[1] == pytest.approx(auc[0], abs=0.02)


@pytest.mark.parametrize("wanted", [False, True])
def test_layers_without_tables_are_compiled_where_it_is_asked_for(tmp_path: Path, wanted: bool) -> None:
    """They compile when they are first called."""
    raw = raw_config(write_all(tmp_path, rows=10), trainer__compile_dense=wanted)
    module = learner_of(make_job(raw)).model.module
    layers = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    found = {name for name, child in module.named_children() if child._compiled_call_impl}
    assert found == (layers - {"embedding_bags"} if wanted else set()) and "embedding_bags" in layers


@pytest.mark.long
def test_compiled_layers_train_alike(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    found = []
    for compiled in (False, True):
        raw = raw_config(tmp_path, trainer__compile_dense=compiled)
        learner = learner_of(make_job(raw))
        kinds = {type(child).__name__ for child in learner.model.module.children() if child._compiled_call_impl}
        assert bool(kinds) is compiled and "ShardedEmbeddingBagCollection" not in kinds
        losses = [learner.step(batches([rows], rows)[0], 1.0)[0] for rows in (32, 17, 0, 5)]
        found.append(torch.stack([*losses, learner.score(batches([9], 9)[0]).sum()]))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
