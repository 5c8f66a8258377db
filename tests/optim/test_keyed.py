"""Keyed and combined optimizers: names in the state, round trips, errors; warmup and clipping around them."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from rayrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    in_backward_optimizer_filter,
)
from rayrec.torchrec.optim import SemisyncOptimizer, WarmupOptimizer, WarmupPolicy, WarmupStage
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_has_the_parameters_device_and_format_as_in_torch(dtype: torch.dtype) -> None:
    saved = keyed(torch.optim.Adam, a=[1.0, 2.0])
    give_gradients(saved)
    saved.step()
    param = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device="meta"))
    optimizer = KeyedOptimizerWrapper({"a": param}, lambda params: torch.optim.Adam(params, lr=0.1))
    optimizer.load_state_dict(saved.state_dict())
    plain, number = torch.optim.Adam([param]), torch.optim.Adam(saved.params.values())
    number.state.update(saved.state)
    plain.load_state_dict(number.state_dict())
    ours, theirs = (
        {key: (value.dtype, value.device) for key, value in each.state[param].items()} for each in (optimizer, plain)
    )
    assert ours == theirs and ours["exp_avg"] == (dtype, torch.device("meta"))


def test_optimizers_can_be_copied_and_pickled() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    keyed = KeyedOptimizerWrapper({"a": param}, partial(torch.optim.Adam, lr=0.1))
    param.grad = torch.ones(2)
    keyed.step()
    combined = CombinedOptimizer([("x", keyed)])
    for duplicate in (lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy):
        copied = duplicate(combined)
        own = copied.params["x.a"]
        assert own is not param and copied.param_groups[0]["params"] == [own]
        for optimizer, trained in ((combined, param), (copied, own)):
            trained.grad = torch.ones(2)
            optimizer.step()
        torch.testing.assert_close(own, param)
        torch.testing.assert_close(copied.state_dict(), combined.state_dict())


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
    with pytest.raises(ValueError, match="is not among its parameters"):
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
        (
            WarmupStage(policy=P.COSINE_ANNEALING_WARM_RESTARTS, max_iters=9, value=0.2, sgdr_period=3),
            [1, 0.8, 0.4, 1, 0.8, 0.4],
        ),
        (WarmupStage(policy=P.STEP, max_iters=9, value=0.5), [1, 0.5, 0.25]),
        (WarmupStage(policy=P.POLY, max_iters=4, value=1, decay_iters=0), [1, 3 / 4, 1 / 2, 1 / 4, 0, 1]),
        (WarmupStage(policy=P.POLY, max_iters=2, value=1, decay_iters=2), [1, 1 / 2, 0, 1]),
        (
            WarmupStage(policy=P.INTERPOLATE, max_iters=5, value=0.5, start_interpolating_iters=1, end_value=2.5),
            [0, 0.5, 1, 1.5, 2, 2.5, 1],
        ),
        (WarmupStage(policy=P.CONSTANT, max_iters=1, value=0.5, lr_scale=3), [1.5, 1.5, 1]),
    ],
    ids=lambda value: value.policy.value if isinstance(value, WarmupStage) else "",
)
def test_each_policy_follows_its_formula(stage: WarmupStage, expected: list[float]) -> None:
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
    optimizer, rates = WarmupOptimizer(keyed(w=[1.0]), stages, lr=3.0), []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        give_gradients(optimizer)
        optimizer.step()
    assert rates == pytest.approx([0.0, 1.5, 3.0])
    other = WarmupOptimizer(CombinedOptimizer([("", keyed(lr=7.0, w=[1.0]))]), stages, lr=3.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.iteration == 3
    for factor in (0.5, 0.5, 1, 1):  # after the last stage the rate is the one that was given
        assert other.param_groups[0]["lr"] == pytest.approx(3.0 * factor)
        other.step()


def test_wrong_schedules_are_named() -> None:
    with pytest.raises(ValueError, match=r"must increase; they are \[5, 5\]"):
        WarmupOptimizer(keyed(w=[1.0]), [WarmupStage(max_iters=5), WarmupStage(max_iters=5)])
    with pytest.raises(ValueError, match="max_iters=0 must be at least 1"):
        WarmupStage(max_iters=0)
    with pytest.raises(ValueError, match="decay_iters=2 ends before max_iters=3"):
        WarmupStage(policy=P.POLY, max_iters=3, decay_iters=2)
    with pytest.raises(ValueError, match="decay_iters=1 ends before max_iters=3"):
        WarmupStage(policy=P.POLY, max_iters=3, decay_iters=1)
    with pytest.raises(ValueError, match="sgdr_period=0 must be at least 1"):
        WarmupStage(sgdr_period=0)
    for some in ({"end_value": 1.0}, {"start_interpolating_iters": 0}):
        with pytest.raises(ValueError, match="start_interpolating_iters and end_value are required"):
            WarmupStage(policy=P.INTERPOLATE, **some)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"they are \[1, 5, 4\]"):
        WarmupOptimizer(keyed(w=[1.0]), [WarmupStage(max_iters=end) for end in (1, 5, 4)])


def test_the_schedules_progress_is_the_state_of_a_parameter_that_is_none() -> None:
    """Its second number is the stage that the next iteration belongs to."""
    optimizer = WarmupOptimizer(keyed(w=[1.0]), [WarmupStage(), WarmupStage(max_iters=3)])
    assert (optimizer.iteration, optimizer.state_dict(), dict(optimizer.state)) == (0, {"state": {}}, {})
    assert optimizer.state_names == list(optimizer.params) == ["w", "__warmup"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1], "the rate by default"
    seen = []
    for _ in range(5):
        optimizer.step()
        seen.append(optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist())
    assert seen == [[1, 0], [2, 1], [3, 1], [4, 2], [5, 2]]
    assert torch.equal(optimizer.state[optimizer.params["__warmup"]]["warmup"], torch.tensor([5, 2]))
    assert not optimizer.params["__warmup"].requires_grad
    optimizer.load_state_dict({"state": {}})  # saved without a schedule
    assert optimizer.iteration == 0


class Noting(KeyedOptimizer):
    """Notes what is passed on to it."""

    def __init__(self, **names: list[float]) -> None:
        params = {name: torch.nn.Parameter(torch.tensor(values)) for name, values in names.items()}
        super().__init__(params, {}, [{"params": list(params.values()), "lr": 1.0}])
        self.told: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.told.append("step")

    def settings_changed(self) -> None:
        self.told.append("settings")

    def post_load_state_dict(self) -> None:
        self.told.append("loaded")

    def set_optimizer_step(self, step: int) -> None:
        self.told.append(step)

    def update_hyper_parameters(self, params_dict: Any) -> None:
        self.told.append(params_dict)

    def global_step(self, count: torch.Tensor, closure: Any) -> None:
        self.told.append(f"global {int(count)}")


def in_a_wrapper(one: KeyedOptimizer) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(one.params, lambda _: one)


@pytest.mark.parametrize(
    ("around", "prefix"),
    [
        (lambda one, other: CombinedOptimizer([("x", one), ("x", other)]), "x."),
        (lambda one, other: CombinedOptimizer([("x", OptimizerWrapper(one)), ("x", OptimizerWrapper(other))]), "x."),
        (lambda one, other: SemisyncOptimizer([1], one, in_a_wrapper(other), num_local_steps=1), ""),
    ],
    ids=["combined", "wrapped", "semi_sync"],
)
def test_all_inner_optimizers_are_told(around: Any, prefix: str) -> None:
    one, other = Noting(a=[1.0]), Noting(b=[2.0])
    both = around(one, other)
    assert [name for name in both.params if "_counter__" not in name] == [f"{prefix}a", f"{prefix}b"]
    both.step()
    both.set_optimizer_step(4)
    both.update_hyper_parameters({"lr": 3})
    semi = isinstance(both, SemisyncOptimizer)
    assert one.told == ["step", 4, {"lr": 3}] and other.told == ["global 1" if semi else "step", 4, {"lr": 3}]
    both.post_load_state_dict()
    both.settings_changed()
    assert one.told[3:] == ["loaded", "settings"] and (semi or other.told[3:] == ["loaded", "settings"])
    both.save_param_groups(True)
    assert [group["params"] for group in both.state_dict()["param_groups"]] == [[f"{prefix}a"], [f"{prefix}b"]]
    assert "param_groups" in one.state_dict()
    give_gradients(CombinedOptimizer([one, other]))
    both.zero_grad(set_to_none=False)
    assert [one.params["a"].grad.item(), other.params["b"].grad.item()] == [0, 0]  # type: ignore[union-attr]
    both.zero_grad()
    assert one.params["a"].grad is other.params["b"].grad is None
    both.zero_grad(set_to_none=False)  # there is none
    assert repr(one) in repr(both)


def test_gradients_are_taken_away_by_a_keyed_optimizer_of_ones_own() -> None:
    own = Noting(a=[1.0], b=[2.0])
    own.params["a"].grad = torch.ones(1)
    own.zero_grad(set_to_none=False)
    assert own.params["a"].grad == 0 and own.params["b"].grad is None
    own.zero_grad()
    assert own.params["a"].grad is None


def test_the_two_counts_may_be_all_that_was_saved() -> None:
    both = SemisyncOptimizer([1], Noting(a=[1.0]), in_a_wrapper(Noting(b=[2.0])), num_local_steps=4)
    counts = {"__semisync_local_step_counter__": torch.tensor(6), "__semisync_global_step_counter__": torch.tensor(1)}
    both.load_state_dict({"state": {"b": counts}})
    assert {name: int(both.params[name]) for name in counts} == {name: int(count) for name, count in counts.items()}


def test_a_local_step_always_and_a_global_one_after_so_many() -> None:
    local, outer = Noting(a=[1.0]), Noting(b=[2.0])
    both = SemisyncOptimizer([1], local, in_a_wrapper(outer), num_local_steps=3)
    for _ in range(7):
        give_gradients(outer)
        both.step()
    assert local.told == ["step"] * 7 and outer.told == ["global 3", "global 6"]
    assert outer.params["b"].grad is not None, "it is taken away for a global step only"
    counts = ["__semisync_global_step_counter__", "__semisync_local_step_counter__"]
    assert [int(both.params[name]) for name in counts] == [2, 7] and both.state_names == ["a", "b"]
    with pytest.raises(ValueError, match="global_params is empty"):
        SemisyncOptimizer([], local, in_a_wrapper(outer))
    with pytest.raises(ValueError, match="wrap an optimizer with global_step"):
        SemisyncOptimizer([1], local, local)
    with pytest.raises(ValueError, match="different tensors"):
        SemisyncOptimizer([1], local, in_a_wrapper(Noting(a=[1.0])))
    with pytest.raises(ValueError, match="no parameter has __semisync_local"):
        both.load_state_dict({"state": {"a": {}}})


def test_a_state_and_what_it_says_of_the_parts_come_back() -> None:
    """Local and global state of one parameter, and how far both have counted."""

    class Outer(torch.optim.SGD):
        def global_step(self, count: torch.Tensor, closure: Any) -> None:
            self.param_groups[0]["params"][0].grad = torch.ones(1)
            self.step(closure)

    def made() -> SemisyncOptimizer:
        local = keyed(torch.optim.Adam, a=[1.0], b=[2.0])
        outer = KeyedOptimizerWrapper({"b": local.params["b"]}, lambda ps: Outer(ps, lr=0.5, momentum=0.9))
        return SemisyncOptimizer([1], local, outer, num_local_steps=2)

    one, other = made(), made()
    for _ in range(3):
        give_gradients(one)
        one.step()
    saved = one.state_dict()["state"]
    assert all(key.startswith("semi_sync_local_") for key in saved["a"]), "the global step knows b alone"
    assert float(saved["b"]["semi_sync_global_momentum_buffer"]) == 1.0
    other.load_state_dict({"state": saved})
    for each in (one, other):
        each.params["a"].data.fill_(1.0), each.params["b"].data.fill_(1.0)
        give_gradients(each)
        each.step()
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    assert torch.equal(other.state[other.params["b"]]["__semisync_global_step_counter__"], torch.tensor(2))


def test_settings_come_back_only_where_both_sides_keep_them() -> None:
    one, other = keyed(lr=0.3, a=[1.0]), keyed(lr=0.5, a=[1.0])
    one.save_param_groups(True)
    saved = {**one.state_dict(), "state": {}}
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.5
    other.save_param_groups(True)
    other.load_state_dict({"state": {}})
    assert other.param_groups[0]["lr"] == 0.5
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.3


def test_state_is_made_by_a_step_with_zero_gradients_of_the_right_layout() -> None:
    optimizer = keyed(a=[1.0], b=[2.0], fixed=[3.0], fused=[4.0])
    optimizer.params["fixed"].requires_grad_(False)
    optimizer.params["fused"]._in_backward_optimizers = []  # type: ignore[attr-defined]
    optimizer.init_state({"b"})
    grads = {name: param.grad for name, param in optimizer.params.items()}
    assert {name: None if grad is None else grad.is_sparse for name, grad in grads.items()} == {
        "a": False, "b": True, "fixed": None, "fused": None,
    }  # fmt: skip
    optimizer = keyed(a=[1.0])
    optimizer.init_state()
    assert optimizer.params["a"].grad == 0


def test_the_norm_is_kept_where_it_is_asked_for() -> None:
    def norm(clipping: GradientClipping, **settings: Any) -> torch.Tensor | None:
        optimizer = GradientClippingOptimizer(keyed(a=[0.0], b=[0.0], c=[0.0]), clipping, **settings)
        for name, grad in (("a", 3.0), ("b", -4.0)):  # c has none
            optimizer.params[name].grad = torch.tensor([grad])
        optimizer.step()
        return optimizer.last_total_grad_norm

    kinds = GradientClipping
    assert [norm(kind) for kind in (kinds.VALUE, kinds.NONE)] == [None, None]
    assert [norm(kind, track_grad_norm=True) for kind in kinds] == [5, 5, 5]
    assert norm(kinds.NORM) == 5 and norm(kinds.NORM, norm_type="inf") == 4


def warm_fused(group: Any) -> list[float]:
    """How far each backward moves a table under a schedule."""
    import rayrec
    from rayrec.distributed import EmbOptimType

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
    return moves


def test_a_fused_optimizer_uses_each_iterations_own_rate() -> None:
    assert on_ranks(1, warm_fused) == [pytest.approx([0, 0.25, 0.5, 0.75, 1, 1], abs=1e-6)]


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
