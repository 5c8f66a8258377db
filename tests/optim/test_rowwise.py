"""The plain row optimizers: the papers' formulas, rows that rest, and agreement with the fused kernels' rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import EmbOptimType
from rayrec.distributed.kernel import OptimizerSpec, optimizer_formulas
from rayrec.torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad

ROWS, DIM = 7, 4
# a class, its settings, and the same for the fused rule
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = [
    (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}, {"learning_rate": 0.1, "eps": 1e-6}),
    (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.2}, {"learning_rate": 0.1, "weight_decay": 0.2}),
    (PartialRowWiseAdam, {"lr": 0.05}, {"learning_rate": 0.05}),
    (
        PartialRowWiseAdam,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
        {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1},
    ),
    (LAMB, {"lr": 0.05}, {"learning_rate": 0.05}),
    (LAMB, {"lr": 0.05, "weight_decay": 0.1}, {"learning_rate": 0.05, "weight_decay": 0.1}),
    (PartialRowWiseLAMB, {"lr": 0.05}, {"learning_rate": 0.05}),
    (PartialRowWiseLAMB, {"lr": 0.05, "weight_decay": 0.1}, {"learning_rate": 0.05, "weight_decay": 0.1}),
    (LarsSGD, {"lr": 10.0}, {"learning_rate": 10.0}),
    (
        LarsSGD,
        {"lr": 10.0, "momentum": 0.5, "eta": 0.01, "weight_decay": 0.1},
        {"learning_rate": 10.0, "momentum": 0.5, "eta": 0.01, "weight_decay": 0.1},
    ),
]
CLASSES = [RowWiseAdagrad, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB, LarsSGD]


def gradients(generator: torch.Generator, touched: list[int]) -> torch.Tensor:
    grad = torch.zeros(ROWS, DIM)
    grad[touched] = torch.randn(len(touched), DIM, generator=generator)
    return grad


def fused(kind: EmbOptimType, params: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    spec = OptimizerSpec.from_fused_params({"optimizer": kind, **params})
    weight, state = start.clone(), optimizer_formulas.make_state(spec, ROWS, DIM, torch.device("cpu"))
    for count, grad in enumerate(grads, start=1):
        rows = (grad != 0).any(1).nonzero().squeeze(1)
        step = optimizer_formulas.Step(rows, weight[rows], grad[rows], state, spec, spec.learning_rate, count)
        optimizer_formulas.apply(weight, step, optimizer_formulas.formula_of(step.spec))
    return weight


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{len(case[1])}")
@settings(max_examples=15)
@given(touched=st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_equals_the_fused_rule(case: Any, touched: list[set[int]], seed: int) -> None:
    kind, plain, params = case
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(ROWS, DIM, generator=generator)
    grads = [gradients(generator, sorted(rows)) for rows in touched]
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **plain)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    expected = fused(EmbOptimType(kind.fused_rule), params, start, grads)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)
    rest = sorted(set(range(ROWS)) - set().union(*touched))
    assert torch.equal(weight.detach()[rest], start[rest])


@pytest.mark.parametrize("kind", CLASSES)
def test_sparse_and_dense_gradients_train_alike(kind: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, DIM)
    results = []
    for sparse in (False, True):
        table = torch.nn.Embedding(ROWS, DIM, _weight=weight.clone(), sparse=sparse)
        optimizer = kind(table.parameters(), lr=0.1)
        for ids in ([1, 3, 3], [0, 1], []):
            optimizer.zero_grad()
            table(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()
            optimizer.step()
        results.append(table.weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_named_row_without_a_gradient_stays_finite(kind: Any) -> None:
    """A sparse gradient may name a row whose gradients cancel."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.zeros(1, 4), (3, 4), check_invariants=True)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3, 4))


def test_row_wise_adagrad_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=0.0)
    total = 0.0
    for grad in ([1.0, 3.0], [2.0, 0.0]):
        before = weight.detach().clone()
        weight.grad = torch.tensor([grad, [0.0, 0.0]])
        optimizer.step()
        total += (grad[0] ** 2 + grad[1] ** 2) / 2
        moved = before[0] - 0.5 * torch.tensor(grad) / math.sqrt(total)
        torch.testing.assert_close(weight.detach()[0], moved)
    assert weight.detach()[1].tolist() == [3.0, 4.0]
    assert optimizer.state[weight]["sum"].view(-1).tolist() == [7.0, 0.0]


def test_row_wise_adagrads_own_settings_by_hand() -> None:
    """The rate falls with the steps, the accumulator starts above 0, weights decay, and steps go up the gradient."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = RowWiseAdagrad(
        [weight], lr=0.5, lr_decay=0.25, weight_decay=0.1, initial_accumulator_value=2.0, eps=0.5, maximize=True
    )
    expected, total = torch.tensor([1.0, 2.0]), 2.0
    for place in range(3):
        weight.grad = torch.tensor([[1.0, -3.0]])
        optimizer.step()
        grad = torch.tensor([-1.0, 3.0]) + 0.1 * expected
        total += float(grad.square().mean())
        expected = expected - 0.5 / (1 + place * 0.25) * grad / (math.sqrt(total) + 0.5)
        torch.testing.assert_close(weight.detach()[0], expected)


def test_settings_by_default_are_torchrecs() -> None:
    adam = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    adagrad = {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-8}
    param = torch.nn.Parameter(torch.ones(2, 2))
    assert RowWiseAdagrad([param]).defaults == {**adagrad, "maximize": False}
    assert all(kind([param], lr=0.1).defaults == adam for kind in (PartialRowWiseAdam, LAMB, PartialRowWiseLAMB))
    lars = {"lr": 0.1, "momentum": 0.9, "eta": 0.001, "weight_decay": 0.0}
    assert LarsSGD([param], lr=0.1).defaults == lars


@pytest.mark.parametrize("kind", CLASSES)
def test_a_closure_is_run_once_with_gradients(kind: Any) -> None:
    weight, calls = torch.nn.Parameter(torch.ones(2, 2)), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert kind([weight], lr=0.1).step(closure) == 4 and calls == [True]
    assert not torch.equal(weight.detach(), torch.ones(2, 2))
    assert kind([weight], lr=0.1).step() is None
    kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.0).step()  # a rate of 0, and no gradient


def test_lamb_moves_a_row_by_lr_times_its_norm() -> None:
    weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = LAMB([weight], lr=0.1)
    weight.grad = torch.tensor([[1.0, -2.0]])
    optimizer.step()
    torch.testing.assert_close((torch.tensor([[3.0, 4.0]]) - weight.detach()).norm(), torch.tensor(0.5))


@pytest.mark.parametrize("kind", CLASSES)
def test_state_dicts_resume_exactly(kind: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    grads = [gradients(generator, [0, 2, 5]) for _ in range(4)]
    weights = []
    for resume in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM))
        optimizer = kind([weight], lr=0.1)
        for place, grad in enumerate(grads):
            if resume and place == 2:
                again = kind([weight], lr=0.9)
                again.load_state_dict(optimizer.state_dict())
                optimizer = again
            weight.grad = grad.clone()
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", CLASSES)
def test_half_precision_tables_and_vectors_train(kind: Any) -> None:
    for param in (torch.nn.Parameter(torch.ones(5, 4, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(6))):
        optimizer = kind([param], lr=1.0)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert torch.isfinite(param).all()


@pytest.mark.parametrize("kind", CLASSES)
def test_wrong_settings_are_named(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: lr=-1"):
        kind([torch.nn.Parameter(torch.ones(2, 2))], lr=-1)
    if kind is not LarsSGD:
        with pytest.raises(ValueError, match=f"{kind.__name__}: eps=-1e-09 must not be negative"):
            kind([torch.nn.Parameter(torch.ones(2, 2))], lr=1, eps=-1e-9)
