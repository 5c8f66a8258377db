"""Losses of rankers against their formulas, on one and two ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rayrec.distributed import comm
from rayrec.models import Batch
from rayrec.models.loss import Head, listnet_loss, pairwise_loss
from rayrec.models.loss_config import Huber, ListNet, LossConfig, Pairwise, Poisson, Ziln
from rayrec.models.retriever import batch_of
from tests.ranks import on_ranks

ROWS = 40


def rows(part: slice = slice(0, ROWS), number: bool = False) -> Batch:
    """Rows of nine groups of different sizes, some of them without a positive."""
    random = torch.Generator().manual_seed(4)
    group = torch.randint(0, 9, (ROWS,), generator=random) ** 2
    label = (torch.rand(ROWS, generator=random) < 0.35).float()
    if number:
        label = label * (3 * torch.rand(ROWS, generator=random)).exp()
    weight = torch.randint(1, 4, (ROWS,), generator=random) / 2
    made = batch_of("item", [[1]] * len(label[part]))
    return replace(made, label=label[part], weight=weight[part], group=group[part])


def outputs(width: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(7))


def bpr_in_groups(score: list[float], batch: Batch, within_groups: bool) -> float:
    """Pair by pair."""
    assert batch.group is not None and batch.weight is not None
    total = weights = 0.0
    for i in range(batch.rows):
        for j in range(batch.rows):
            if batch.label[i] and not batch.label[j] and (not within_groups or batch.group[i] == batch.group[j]):
                weight = float(batch.weight[i] * batch.weight[j])
                total += weight * math.log1p(math.exp(score[j] - score[i]))
                weights += weight
    return total / weights


def listnet_by_hand(score: list[float], batch: Batch) -> float:
    """Group by group."""
    assert batch.group is not None and batch.weight is not None
    found = []
    for group in batch.group.unique().tolist():
        members = [i for i in range(batch.rows) if batch.group[i] == group]
        targets = [float(batch.label[i] * batch.weight[i]) for i in members]
        if sum(targets):
            log_z = math.log(sum(math.exp(score[i]) for i in members))
            found.append(sum(t / sum(targets) * (log_z - score[i]) for t, i in zip(targets, members, strict=True)))
    return sum(found) / len(found)


def test_losses_within_groups_are_their_formulas() -> None:
    batch, score = rows(), outputs()[:, 0]
    for by_group in (False, True):
        wanted = bpr_in_groups(score.tolist(), batch, by_group)
        assert float(pairwise_loss(score, batch, by_group=by_group)) == pytest.approx(wanted, rel=1e-5)
    assert float(listnet_loss(score, batch)) == pytest.approx(listnet_by_hand(score.tolist(), batch), rel=1e-5)
    for function in (pairwise_loss, listnet_loss):
        nothing = replace(batch, label=torch.zeros(ROWS))
        assert float(function(score, nothing, by_group=True)) == 0.0
        with pytest.raises(ValueError, match=r"set schema\.group"):
            function(score, replace(batch, group=None), by_group=True)


def head_of(loss: LossConfig, number: bool) -> Head:
    head = Head([1.0] * 3) if isinstance(loss, Ziln) else Head(None, label_kinds=["number"] if number else None)
    head.loss = loss
    return head


def gradients(group: dist.ProcessGroup | None, loss: LossConfig) -> tuple[float, torch.Tensor]:
    """The loss of all rows and its gradient, the rows dealt to the ranks unevenly."""
    number = isinstance(loss, Huber | Poisson | Ziln)
    head = head_of(loss, number)
    head.on_sharded(group)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    part = slice(0, ROWS) if size == 1 else slice(0, 13) if rank == 0 else slice(13, ROWS)
    whole = outputs(3 if isinstance(loss, Ziln) else 1).requires_grad_()
    batch = rows(part, number)
    share = batch.total_weight / rows(number=number).total_weight
    value, logits = head(whole[part], batch)
    assert logits.shape == (batch.rows,)
    (value * share).backward()
    assert whole.grad is not None
    return float(comm.all_reduce((value * share).detach(), group)), comm.all_reduce(whole.grad.clone(), group)


LOSSES = [Pairwise(within="group"), ListNet(), Huber(delta=0.7), Poisson(), Ziln()]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_a_loss_is_one_function_on_two_ranks(loss: LossConfig) -> None:
    wanted, gradient = gradients(None, loss)
    assert gradient.any()
    for found, of_ranks in on_ranks(2, gradients, loss):
        assert found == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(of_ranks, gradient, rtol=1e-4, atol=1e-6)


def test_losses_of_numbers_are_their_formulas() -> None:
    batch = rows(number=True)
    assert batch.weight is not None
    for loss in (Huber(delta=0.7), Poisson(), Ziln()):
        given_outputs = outputs(3 if isinstance(loss, Ziln) else 1)
        total = 0.0
        for row, (label, weight) in enumerate(zip(batch.label.tolist(), batch.weight.tolist(), strict=True)):
            out = given_outputs[row].double().tolist()
            if isinstance(loss, Huber):
                error = abs(out[0] - label)
                each = error**2 / 2 if error < 0.7 else 0.7 * (error - 0.35)
            elif isinstance(loss, Poisson):
                each = math.exp(out[0]) - label * out[0]
            else:
                chance, deviation = 1 / (1 + math.exp(-out[0])), math.log1p(math.exp(out[2]))
                each = -math.log(1 - chance)
                if label > 0:
                    density = torch.distributions.LogNormal(out[1], deviation).log_prob(torch.tensor(label).double())
                    each = -math.log(chance) - float(density)
            total += weight * each
        found, logits = head_of(loss, True)(given_outputs, batch)
        assert float(found) == pytest.approx(total / float(batch.weight.sum()), rel=1e-5)
        out = given_outputs.double()
        expected = {
            "huber": out[:, 0],
            "poisson": out[:, 0].exp(),
            "ziln": out[:, 0].sigmoid() * (out[:, 1 % out.shape[1]] + out[:, -1].exp().log1p() ** 2 / 2).exp(),
        }
        torch.testing.assert_close(logits.double(), expected[loss.kind], rtol=1e-5, atol=1e-6)


@given(st.floats(-80, 80), st.floats(-80, 80), st.floats(-80, 80), st.floats(0, 1e20))
def test_a_zero_inflated_loss_and_its_gradient_are_finite(logit: float, mean: float, raw: float, label: float) -> None:
    given_outputs = torch.tensor([[logit, mean, raw]], requires_grad=True)
    batch = replace(batch_of("item", [[1]]), label=torch.tensor([label]))
    loss, logits = head_of(Ziln(), True)(given_outputs, batch)
    loss.backward()
    assert given_outputs.grad is not None
    assert loss.isfinite() and logits.isfinite().all() and given_outputs.grad.isfinite().all()
