"""Cases of the optimizers: state layouts, schedules, clipping, and steps on drawn gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.torchrec.case import Cases
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.arange(1.0, 4.0) + place) for place, name in enumerate(names)}


def keyed(rec: Package, kind: Any = torch.optim.Adam, lr: float = 0.1, names: str = "ab") -> Any:
    return rec.optim.KeyedOptimizerWrapper(parameters(*names), lambda params: kind(params, lr=lr))


def train(optimizer: Any, steps: int = 3, size: float = 1.0) -> list[Any]:
    """Parameters after steps with gradients that depend on the step alone."""
    for step in range(steps):
        for place, param in enumerate(optimizer.params.values()):
            if param.requires_grad and param.dim() and param.numel() > 1:
                param.grad = size * torch.sin(torch.arange(param.numel()).view(param.shape) + step + place)
        optimizer.step()
    return [param.detach().clone() for param in optimizer.params.values() if param.numel() > 1]


@case("0/torchrec.optim")
def top_level_optim(rec: Package) -> Any:
    names = "Adagrad Adam CombinedOptimizer FusedOptimizer FusedOptimizerModule GradientClipping LAMB LarsSGD SGD "
    names += "GradientClippingOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper PartialRowWiseAdam "
    names += "RowWiseAdagrad WarmupOptimizer WarmupPolicy WarmupStage"
    return [isinstance(getattr(rec.optim, name), type) for name in names.split()]


@case("0/torchrec.optim")
def top_level_optim_rest(rec: Package) -> Any:
    return [isinstance(getattr(rec.optim, name), type) for name in ("SemisyncOptimizer", "PartialRowWiseLAMB")]


@case("4/KeyedOptimizer")
def keyed_optimizer(rec: Package) -> Any:
    params = parameters("a", "b")
    state = {params["a"]: {"n": torch.ones(1)}}
    one = rec.optim.KeyedOptimizer(params, state, [{"params": list(params.values()), "lr": 0.5}])
    wrong = attempt(lambda: rec.optim.KeyedOptimizer(params, {nn.Parameter(torch.ones(1)): {}}, []))
    return [list(one.params), one.state_dict(), one.param_groups[0]["lr"], wrong]


@case("4/KeyedOptimizer.state_dict")
def state_layout(rec: Package) -> Any:
    one = keyed(rec)
    fresh = one.state_dict()
    train(one)
    stepped = one.state_dict()
    one.save_param_groups(True)
    return [fresh, stepped, one.state_dict()["param_groups"][0]["params"]]


@case("4/KeyedOptimizer.load_state_dict")
def loading(rec: Package) -> Any:
    one, other = keyed(rec), keyed(rec, lr=0.5)
    train(one)
    other.init_state()
    other.load_state_dict(one.state_dict())
    unknown = {"state": {**one.state_dict()["state"], "z": {}}}
    missing = {"state": {"a": one.state_dict()["state"]["a"]}}
    return [
        other.state_dict(),
        other.param_groups[0]["lr"],
        [attempt(lambda sd=sd: other.load_state_dict(sd)) for sd in (unknown, missing)],
    ]


@case("4/KeyedOptimizer.load_state_dict", "a stepped state loads into a fresh optimizer, which resumes exactly")
def loading_into_a_fresh_one(rec: Package) -> Any:
    one, other = keyed(rec), keyed(rec)
    train(one)
    other.load_state_dict(one.state_dict())
    return other.state_dict()


@case("4/KeyedOptimizer.load_state_dict")
def loading_groups(rec: Package) -> Any:
    one, other = keyed(rec, lr=0.3), keyed(rec, lr=0.5)
    for each in (one, other):
        each.init_state()
        each.save_param_groups(True)
    other.load_state_dict(one.state_dict())
    return [other.param_groups[0]["lr"]]


@case("4/init_state")
def made_state(rec: Package) -> Any:
    decayed = rec.optim.KeyedOptimizerWrapper(
        parameters("a"), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5)
    )
    decayed.init_state()
    one = keyed(rec)
    one.init_state(sparse_grad_parameter_names=set())
    grads = [param.grad for param in one.params.values()]
    return [decayed.params["a"], one.state_dict(), grads]


@case("4/save_param_groups")
def saving_groups(rec: Package) -> Any:
    both = rec.optim.CombinedOptimizer([("x", keyed(rec)), ("y", keyed(rec, torch.optim.SGD))])
    both.save_param_groups(True)
    groups = [group["params"] for group in both.state_dict()["param_groups"]]
    both.post_load_state_dict()
    return [groups, list(keyed(rec).state_dict())]


@case("4/KeyedOptimizer.add_param_group")
def adding_groups(rec: Package) -> Any:
    one = rec.optim.KeyedOptimizer(parameters("a"), {}, [])
    return attempt(lambda: one.add_param_group({"params": []}))


@case("4/set_optimizer_step")
def passed_on(rec: Package) -> Any:
    seen = []

    class Told(torch.optim.SGD):
        def set_optimizer_step(self, step: int) -> None:
            seen.append(step)

        def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
            seen.append(params_dict)

    both = rec.optim.CombinedOptimizer([("x", rec.optim.OptimizerWrapper(keyed(rec, Told))), ("y", keyed(rec))])
    both.set_optimizer_step(4)
    both.update_hyper_parameters({"lr": 3})
    return seen


@case("4/KeyedOptimizerWrapper")
def wrapped(rec: Package) -> Any:
    make = rec.optim.KeyedOptimizerWrapper
    seen: list[Any] = []

    def factory(params: Any) -> Any:
        seen.append(sorted(params) if isinstance(params, dict) else len(params))
        return torch.optim.SGD(params.values() if isinstance(params, dict) else params, lr=0.1)

    make(params=parameters("a", "b"), optim_factory=factory, pass_params_dict=True)
    one = make(parameters("a", "b"), factory)
    return [seen, train(one), one.step()]


@case("4/CombinedOptimizer")
def combined(rec: Package) -> Any:
    first, second = keyed(rec), keyed(rec, torch.optim.Adagrad, names="c")
    both = rec.optim.CombinedOptimizer([("x", first), second])
    values = train(both)
    grads = [param.grad.clone() for param in both.params.values()]
    both.zero_grad()
    twice = attempt(lambda: rec.optim.CombinedOptimizer([keyed(rec), keyed(rec)]))
    after = [param.grad for param in both.params.values()]
    return [
        list(both.params),
        values,
        both.state_dict(),
        grads,
        after,
        len(both.param_groups),
        twice,
        len(both.optimizers),
    ]


@case("4/CombinedOptimizer.prepend_opt_key")
def prepended(rec: Package) -> Any:
    join = rec.optim.CombinedOptimizer.prepend_opt_key
    return [join("a", "x"), join("a", "")]


@case("4/OptimizerWrapper")
def outer(rec: Package) -> Any:
    one = rec.optim.OptimizerWrapper(keyed(rec))
    return [train(one), list(one.params), one.state_dict(), one.param_groups[0]["lr"]]


@case("4/WarmupOptimizer")
def warmups(rec: Package) -> Any:
    stage, policy = rec.optim.WarmupStage, rec.optim.WarmupPolicy
    stages = [stage(policy.LINEAR, 3, 0.1), stage(policy.CONSTANT, 5, 0.5)]
    one = rec.optim.WarmupOptimizer(keyed(rec), stages)
    fresh = [one.state_dict(), list(one.params), one.param_groups[0]["lr"]]
    rates, values = [], []
    for _ in range(7):
        rates.append(one.param_groups[0]["lr"])
        values.append(train(one, 1))
    named = rec.optim.WarmupOptimizer(keyed(rec), stages, 0.4, "lr", "__mine")
    train(named, 2)
    return [
        fresh,
        rates,
        values,
        one.state_dict()["state"]["__warmup"],
        named.state_dict(),
        named.param_groups[0]["lr"],
    ]


@case("4/WarmupOptimizer")
def warmup_resumed(rec: Package) -> Any:
    stages = [rec.optim.WarmupStage(rec.optim.WarmupPolicy.LINEAR, 6, 0.1)]
    one, other = (rec.optim.WarmupOptimizer(keyed(rec), stages, lr=0.4) for _ in range(2))
    train(one, 3)
    other.init_state()
    other.load_state_dict(one.state_dict())
    rates = [each.param_groups[0]["lr"] for each in (one, other)]
    return [rates, train(other, 2)[0].shape, other.param_groups[0]["lr"], other.state_dict()["state"]["__warmup"]]


@case("4/WarmupStage")
def stages_by_position(rec: Package) -> Any:
    one = rec.optim.WarmupStage(rec.optim.WarmupPolicy.STEP, 3, 0.5, 2.0, -1, 1)
    one.value = 0.25
    default = rec.optim.WarmupStage()
    return [one.value, default.policy, default.max_iters, default.lr_scale, default.decay_iters, default.end_value]


@case("4/WarmupPolicy")
def policies(rec: Package) -> Any:
    policy, out = rec.optim.WarmupPolicy, {}
    drawn: list[tuple[str, dict[str, Any]]] = [
        ("NONE", {}),
        ("LINEAR", {"value": 0.2}),
        ("CONSTANT", {"value": 0.3, "lr_scale": 2.0}),
        ("POLY", {"value": 2.0}),
        ("POLY", {"value": 1.0, "decay_iters": 12}),
        ("STEP", {"value": 0.5, "decay_iters": 2}),
        ("STEP", {"value": 0.5}),
        ("COSINE_ANNEALING_WARM_RESTARTS", {"value": 0.1, "sgdr_period": 3}),
        ("INTERPOLATE", {"value": 0.1, "start_interpolating_iters": 0, "end_value": 0.7}),
    ]
    for name, settings in drawn:
        stages = [rec.optim.WarmupStage(policy=policy[name], max_iters=6, **settings)]
        one = rec.optim.WarmupOptimizer(keyed(rec, torch.optim.SGD), stages, lr=2.0)
        rates = []
        for _ in range(9):
            rates.append(one.param_groups[0]["lr"])
            train(one, 1)
        out[f"{name} {sorted(settings)}"] = rates
    return [out, sorted((member.name, member.value) for member in policy)]


@case("4/WarmupPolicy", "INVSQRT is 1 at iteration 0, where TorchRec divides by zero")
def inverse_root_at_zero(rec: Package) -> Any:
    stages = [rec.optim.WarmupStage(rec.optim.WarmupPolicy.INVSQRT, 4)]
    return rec.optim.WarmupOptimizer(keyed(rec), stages, lr=2.0).param_groups[0]["lr"]


@case("4/GradientClippingOptimizer")
def clipped(rec: Package) -> Any:
    kinds, out = rec.optim.GradientClipping, []
    for settings in (
        (),
        (kinds.NORM, 0.5),
        (kinds.NORM, 0.5, float("inf")),
        (kinds.NORM, 0.5, "inf"),
        (kinds.NORM, 100.0),
        (kinds.VALUE, 0.3),
        (kinds.NORM, 0.0),
        (kinds.VALUE, 0.0),
        (kinds.NORM, -1.0),
    ):
        out.append(train(rec.optim.GradientClippingOptimizer(keyed(rec, torch.optim.SGD), *settings)))
    idle = rec.optim.GradientClippingOptimizer(keyed(rec), kinds.NORM, 1.0)
    return [out, idle.step()]


@case("4/last_total_grad_norm")
def gradient_norms(rec: Package) -> Any:
    kinds, out = rec.optim.GradientClipping, []
    for kind, tracked in ((kinds.NORM, False), (kinds.NONE, True), (kinds.NONE, False), (kinds.VALUE, True)):
        one = rec.optim.GradientClippingOptimizer(keyed(rec), kind, 0.5, track_grad_norm=tracked)
        before = one.last_total_grad_norm
        train(one, 1)
        norm = one.last_total_grad_norm
        out.append([before, None if norm is None else float(norm)])
    return out


@case("4/GradientClipping")
def clipping_kinds(rec: Package) -> Any:
    return [(member.name, member.value) for member in rec.optim.GradientClipping]


@case("4/apply_optimizer_in_backward.apply_optimizer_in_backward")
def in_backward(rec: Package) -> Any:
    apply = rec("optim.apply_optimizer_in_backward").apply_optimizer_in_backward
    weight = nn.Parameter(torch.arange(3.0))
    apply(torch.optim.SGD, [weight], {"lr": 0.5})
    (weight * 2).sum().backward()
    return [weight, weight.grad, hasattr(weight, "_in_backward_optimizers")]


@case("4/optimizers.in_backward_optimizer_filter")
def filtered(rec: Package) -> Any:
    home = rec("optim.optimizers")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rec.optim.apply_optimizer_in_backward(torch.optim.SGD, net[0].parameters(), {"lr": 0.5})
    names = [
        [name for name, _ in home.in_backward_optimizer_filter(net.named_parameters(), flag)] for flag in (False, True)
    ]
    return [*names, [name for name, _ in home.in_backward_optimizer_filter(net.named_parameters())]]


@case("4/rowwise_adagrad.RowWiseAdagrad")
def rowwise(rec: Package) -> Any:
    make, out = rec("optim.rowwise_adagrad").RowWiseAdagrad, []
    for settings in ({}, {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": True}):
        weight = nn.Parameter(torch.sin(torch.arange(12.0)).view(4, 3))
        one = make([weight], **settings)
        for step in range(4):
            weight.grad = torch.cos(torch.arange(12.0) + step).view(4, 3)
            one.step()
        out.append([weight.detach(), one.state[weight]["sum"], float(one.state[weight]["step"])])
    return out


@case("4/rowwise_adagrad.RowWiseAdagrad", "weight decay acts on the rows that a batch touched, as in the fused update")
def rowwise_decay(rec: Package) -> Any:
    weight = nn.Parameter(torch.ones(2, 2))
    one = rec.optim.RowWiseAdagrad([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    one.step()
    return weight


@case("4/SGD")
def table_optimizers(rec: Package) -> Any:
    weight, out = nn.Parameter(torch.ones(2, 2)), []
    for name in ("SGD", "Adagrad", "Adam", "LAMB", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB"):
        one = getattr(rec.optim, name)([weight], lr=0.1)
        out.append(isinstance(one, torch.optim.Optimizer))
    return out


@case("4/SGD", "they step as torch's do; TorchRec's only name a fused update and raise")
def table_optimizers_step(rec: Package) -> Any:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    return attempt(rec.optim.SGD([weight], lr=0.1).step)


@case("4/fused.FusedOptimizer")
def fused_bases(rec: Package) -> Any:
    home = rec("optim.fused")
    empty = home.EmptyFusedOptimizer()
    return [
        issubclass(home.FusedOptimizer, rec.optim.KeyedOptimizer),
        empty.step(),
        empty.state_dict(),
        attempt(lambda: home.FusedOptimizerModule() and None),
    ]


class Outer(torch.optim.Optimizer):
    """Moves half of the way back to where the last global step ended, and counts its steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def global_step(self, counter: torch.Tensor, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            anchor = state.setdefault("anchor", torch.zeros_like(param))
            param.copy_((param + anchor) / 2)
            anchor.copy_(param)
            state["at"] = counter.clone()


def two_in_one(rec: Package, every: int = 2) -> Any:
    params = parameters("a", "b")
    local = rec.optim.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adam(given, lr=0.1))
    outer = rec.optim.KeyedOptimizerWrapper(params, Outer)
    make = rec("optim.semi_sync").SemisyncOptimizer
    return make(list(params.values()), local, outer, every)


@case("4/semi_sync.SemisyncOptimizer")
def semi_sync(rec: Package) -> Any:
    one = two_in_one(rec)
    moved = train(one, 5)
    one.save_param_groups(True)
    return [moved, one.state_dict(), list(one.params), len(one.param_groups)]


@case("4/semi_sync.SemisyncOptimizer")
def semi_sync_resumed(rec: Package) -> Any:
    one, other = two_in_one(rec), two_in_one(rec)
    train(one, 3)
    train(other, 2)
    with torch.no_grad():
        for name, param in other.params.items():
            param.copy_(one.params[name])
    other.load_state_dict(one.state_dict())
    return [train(one, 3), train(other, 3), other.state_dict()]


@case("4/KeyedOptimizerWrapper")
def drawn_optimizers(rec: Package) -> Any:
    out = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        rates = torch.rand(3, generator=generator).tolist()
        kind = (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)[seed % 3]
        stages = [rec.optim.WarmupStage(rec.optim.WarmupPolicy.LINEAR, 2 + seed % 4, rates[0])]
        inner = rec.optim.WarmupOptimizer(keyed(rec, kind), stages, lr=rates[1])
        clipping = (rec.optim.GradientClipping.NORM, rec.optim.GradientClipping.VALUE)[seed % 2]
        one = rec.optim.CombinedOptimizer([("d", rec.optim.GradientClippingOptimizer(inner, clipping, rates[2]))])
        out.append([train(one, 6, 3.0), one.state_dict()])
    return out
