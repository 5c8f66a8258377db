"""Keyed and combined optimizers: names in the state, round trips, errors; warmup and clipping around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rayrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    in_backward_optimizer_filter,
)
from rayrec.optim.warmup import factor
from tests.ranks import on_ranks


def keyed(kind: Any = torch.optim.SGD, lr: float = 0.1, **names: list[float]) -> KeyedOptimizerWrapper:
    params = {name: torch.nn.Parameter(torch.tensor(values)) for name, values in names.items()}
    return KeyedOptimizerWrapper(params, lambda ps: kind(ps, lr=lr))


def give_gradients(optimizer: Any, value: float = 1.0) -> None:
    for param in optimizer.params.values():
        param.grad = torch.full_like(param, value)


def test_state_is_kept_by_name() -> None:
    optimizer = keyed(torch.optim.Adam, a=[1.0], b=[2.0])
    give_gradients(optimizer)
    optimizer.step()
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == ["a", "b"]
    assert saved["param_groups"][0]["params"] == ["a", "b"]
    assert set(saved["state"]["a"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_fresh_optimizer_resumes_exactly_and_leaves_the_saved_state_alone() -> None:
    results = []
    for resume in (False, True):
        optimizer = keyed(torch.optim.Adam, a=[1.0, 2.0])
        for place in range(4):
            if resume and place == 2:
                optimizer.save_param_groups(True)
                saved = optimizer.state_dict()
                before = saved["state"]["a"]["exp_avg"].clone()
                params = optimizer.params
                optimizer = KeyedOptimizerWrapper(params, lambda ps: torch.optim.Adam(ps, lr=9.0))
                optimizer.save_param_groups(True)
                optimizer.load_state_dict(saved)
            give_gradients(optimizer, place + 1.0)
            optimizer.step()
        results.append(optimizer.params["a"].detach())
    assert torch.equal(*results)
    assert torch.equal(saved["state"]["a"]["exp_avg"], before)


def test_combined_optimizers_prefix_names_and_round_trip() -> None:
    first, second = keyed(torch.optim.Adam, w=[1.0]), keyed(torch.optim.Adagrad, w=[2.0])
    both = CombinedOptimizer([("dense", first), ("sparse", second)])
    assert list(both.params) == ["dense.w", "sparse.w"]
    assert len(both.param_groups) == 2
    give_gradients(both)
    both.step()
    both.save_param_groups(True)
    saved = both.state_dict()
    assert saved["param_groups"][1]["params"] == ["sparse.w"]
    other = CombinedOptimizer(
        [("dense", keyed(torch.optim.Adam, w=[1.0])), ("sparse", keyed(torch.optim.Adagrad, lr=3, w=[2.0]))]
    )
    other.save_param_groups(True)
    other.load_state_dict(saved)
    assert other.param_groups[1]["lr"] == 0.1
    assert torch.equal(other.state_dict()["state"]["sparse.w"]["sum"], saved["state"]["sparse.w"]["sum"])
    both.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in both.params.values())
    both.zero_grad()
    assert all(param.grad is None for param in both.params.values())


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: inner,
        lambda inner: WarmupOptimizer(inner, [WarmupStage()]),
        lambda inner: GradientClippingOptimizer(inner, GradientClipping.NORM, 1.0),
    ],
    ids=["alone", "warmup", "clipping"],
)
def test_gradients_are_taken_away_unless_zeros_are_asked_for(around: Any) -> None:
    inner = keyed(a=[1.0])
    optimizer, param = around(inner), inner.params["a"]
    give_gradients(inner)
    optimizer.zero_grad(set_to_none=False)
    assert param.grad == 0
    optimizer.zero_grad()
    assert param.grad is None


def test_optimizers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="two optimizers hold a parameter 'a'"):
        CombinedOptimizer([keyed(a=[1.0]), keyed(a=[1.0])])
    both = CombinedOptimizer([("x", keyed(torch.optim.Adam, a=[1.0]))])
    give_gradients(both)
    both.step()
    with pytest.raises(ValueError, match=r"only this optimizer has a parameter 'x.a'"):
        both.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match=r"only the state to load has a parameter 'b'"):
        keyed(a=[1.0]).load_state_dict({"state": {"a": {}, "b": {}}})
    groups = keyed(a=[1.0])
    groups.save_param_groups(True)
    with pytest.raises(ValueError, match="it has 0 parameter groups, this optimizer 1"):
        groups.load_state_dict({"state": {"a": {}}, "param_groups": []})
    with pytest.raises(ValueError, match="none of its parameters"):
        KeyedOptimizer({}, {torch.ones(1): {}}, [])


def test_torch_schedulers_drive_combined_optimizers() -> None:
    both = CombinedOptimizer([("a", keyed(lr=1.0, w=[1.0])), ("b", keyed(lr=2.0, w=[1.0]))])
    schedule = torch.optim.lr_scheduler.ExponentialLR(both, gamma=0.5)
    for _ in range(2):
        give_gradients(both)
        both.step()
        schedule.step()
    assert [group["lr"] for group in both.param_groups] == [0.25, 0.5]


P = WarmupPolicy


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (WarmupStage(policy=P.NONE, max_iters=2), [1, 1, 1]),
        (WarmupStage(policy=P.CONSTANT, max_iters=9, value=0.3), [0.3, 0.3, 0.3]),
        (WarmupStage(policy=P.LINEAR, max_iters=4, value=0.2), [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
        (WarmupStage(policy=P.POLY, max_iters=4, value=2), [1, 9 / 16, 1 / 4, 1 / 16, 0, 1]),
        (WarmupStage(policy=P.POLY, max_iters=2, value=1, decay_iters=8), [1, 7 / 8, 6 / 8, 1]),
        (WarmupStage(policy=P.STEP, max_iters=9, value=0.5, decay_iters=2), [1, 1, 0.5, 0.5, 0.25]),
        (WarmupStage(policy=P.INVSQRT, max_iters=9), [1, 1, 1 / math.sqrt(2), 1 / math.sqrt(3)]),
        (
            WarmupStage(policy=P.COSINE_ANNEALING_WARM_RESTARTS, max_iters=9, value=0.1, sgdr_period=2),
            [1, 0.55, 1, 0.55],
        ),
        (WarmupStage(policy=P.CONSTANT, max_iters=1, value=0.5, lr_scale=3), [1.5, 1.5, 1]),
    ],
    ids=lambda value: value.policy.value if isinstance(value, WarmupStage) else "",
)
def test_each_policy_follows_its_formula(stage: WarmupStage, expected: list[float]) -> None:
    assert [factor([stage], i) for i in range(len(expected))] == pytest.approx(expected)
    optimizer = WarmupOptimizer(keyed(lr=7.0, w=[1.0]), [stage], lr=2.0)
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        give_gradients(optimizer)
        optimizer.step()
    assert rates == pytest.approx([2 * f for f in expected])


def test_stages_follow_one_another_and_a_resumed_schedule_goes_on() -> None:
    stages = [
        WarmupStage(policy=P.LINEAR, max_iters=2, value=0.0),
        WarmupStage(policy=P.CONSTANT, max_iters=4, value=0.5),
    ]
    whole = [factor(stages, i) for i in range(7)]
    assert whole == [0, 0.5, 1, 0.5, 0.5, 1, 1]
    optimizer = WarmupOptimizer(keyed(w=[1.0]), stages, lr=3.0)
    for _ in range(3):
        give_gradients(optimizer)
        optimizer.step()
    other = WarmupOptimizer(CombinedOptimizer([("", keyed(lr=7.0, w=[1.0]))]), stages, lr=3.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.iteration == 3
    assert other.param_groups[0]["lr"] == pytest.approx(3.0 * whole[3])


def test_wrong_schedules_are_named() -> None:
    with pytest.raises(ValueError, match=r"max_iters are \[5, 5\]"):
        WarmupOptimizer(keyed(w=[1.0]), [WarmupStage(max_iters=5), WarmupStage(max_iters=5)])
    with pytest.raises(ValueError, match="max_iters=0 must be at least 1"):
        WarmupStage(max_iters=0)
    with pytest.raises(ValueError, match="decay_iters=2 ends before max_iters=3"):
        WarmupStage(policy=P.POLY, max_iters=3, decay_iters=2)


def warm_fused(group: Any) -> list[list[float]]:
    """How far each backward moves a table under a schedule, and the rates that were set."""
    import rayrec
    from rayrec.distributed.kernel import EmbOptimType

    config = rayrec.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    sharder = rayrec.distributed.EmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    )
    model = rayrec.distributed.DistributedModelParallel(
        rayrec.EmbeddingBagCollection([config]), device=torch.device("cpu"), sharders=[sharder]
    )
    stages = [WarmupStage(policy=P.LINEAR, max_iters=4, value=0.0)]
    optimizer = WarmupOptimizer(model.fused_optimizer, stages, lr=1.0)
    kjt = rayrec.KeyedJaggedTensor(["f"], torch.tensor([2]), lengths=torch.tensor([1]))
    moves = []
    for _ in range(6):
        optimizer.zero_grad()
        (shard,) = model.tables()["embedding_bags.t"].local
        before = shard.weight.clone()
        model(kjt).wait().values().sum().backward()
        moves.append((before - shard.weight)[2, 0].item())
        optimizer.step()
    return [moves, [factor(stages, i) for i in range(6)]]


def test_a_fused_optimizer_uses_each_iterations_own_rate() -> None:
    ((moves, rates),) = on_ranks(1, warm_fused)
    assert moves == pytest.approx(rates, abs=1e-6)


def test_gradients_are_clipped_by_norm_and_by_value() -> None:
    def moved(clipping: GradientClipping, **settings: float) -> list[float]:
        inner = keyed(lr=1.0, a=[0.0], b=[0.0])
        optimizer = GradientClippingOptimizer(inner, clipping, **settings)
        inner.params["a"].grad, inner.params["b"].grad = torch.tensor([3.0]), torch.tensor([-4.0])
        optimizer.step()
        return [inner.params["a"].item(), inner.params["b"].item()]

    assert moved(GradientClipping.NONE) == [-3.0, 4.0]
    assert moved(GradientClipping.NORM, max_gradient=10.0) == [-3.0, 4.0]
    assert moved(GradientClipping.NORM, max_gradient=1.0) == pytest.approx([-0.6, 0.8])
    assert moved(GradientClipping.NORM, max_gradient=2.0, norm_type=math.inf) == pytest.approx([-1.5, 2.0])
    assert moved(GradientClipping.VALUE, max_gradient=3.5) == [-3.0, 3.5]
    assert moved(GradientClipping.NORM, max_gradient=0) == [0.0, 0.0]
    assert moved(GradientClipping.VALUE, max_gradient=0) == [0.0, 0.0]


def test_clipping_around_warmup_keeps_names_and_state() -> None:
    inner = WarmupOptimizer(keyed(torch.optim.Adam, a=[1.0]), [WarmupStage(max_iters=3, value=0.1)])
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0)
    give_gradients(optimizer, 100.0)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == ["a", "__warmup"]
    assert optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist() == [1, 0]
    assert optimizer.last_total_grad_norm is not None
    assert "lr: " in repr(optimizer)


def test_the_filter_tells_fused_parameters_from_others() -> None:
    plain, fused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    fused._in_backward_optimizers = []  # type: ignore[attr-defined]
    named = [("plain", plain), ("fused", fused)]
    assert [name for name, _ in in_backward_optimizer_filter(named)] == ["plain"]
    assert [name for name, _ in in_backward_optimizer_filter(named, include=True)] == ["fused"]
