"""Cross networks, MLP and activations against the papers' formulas, spelled out example by example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rayrec.modules import MLP, CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, SwishLayerNorm, VectorCrossNet
from rayrec.modules.fm import pairwise_sum

N, LAYERS = 5, 3


def full(net: CrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for layer in net.layers:
        x = x0 * (layer.weight @ x + layer.bias) + x
    return x


def low_rank(net: LowRankCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for down, up in zip(net.down, net.up, strict=True):
        x = x0 * (up.weight @ (down.weight @ x) + up.bias) + x
    return x


def vector(net: VectorCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for w, b in zip(net.weight_LN, net.bias_LN, strict=True):
        x = torch.outer(x0, x) @ w + b + x
    return x


def mixture(net: LowRankMixtureCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for place in range(LAYERS):
        experts = []
        for down, core, up in zip(net.down_LKNR[place], net.core_LKRR[place], net.up_LKRN[place], strict=True):
            inner = torch.relu(core.T @ torch.relu(down.T @ x))
            experts.append(x0 * (up.T @ inner + net.bias_LN[place]))
        shares = torch.ones(1) if len(experts) == 1 else torch.softmax(net.gates[place].weight @ x, dim=0)
        x = sum((share * expert for share, expert in zip(shares, experts, strict=True)), torch.zeros(N)) + x
    return x


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "full": (lambda: CrossNet(N, LAYERS), full),
    "low_rank": (lambda: LowRankCrossNet(N, LAYERS, 2), low_rank),
    "vector": (lambda: VectorCrossNet(N, LAYERS), vector),
    "one_expert": (lambda: LowRankMixtureCrossNet(N, LAYERS, 1, 2), mixture),
    "mixture": (lambda: LowRankMixtureCrossNet(N, LAYERS, 4, 2), mixture),
}


@pytest.mark.parametrize("name", list(CASES))
def test_each_cross_follows_its_formula(name: str) -> None:
    make, formula = CASES[name]
    torch.manual_seed(0)
    net = make()
    for parameter in net.parameters():  # biases start at zero, which would hide them
        nn.init.normal_(parameter, std=0.5)
    inputs = torch.randn(6, N)
    out = net(inputs)
    torch.testing.assert_close(out, torch.stack([formula(net, x) for x in inputs]), atol=1e-5, rtol=1e-4)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize("name", list(CASES))
def test_crosses_are_seeded_take_empty_batches_and_leave_meta(name: str) -> None:
    make, _ = CASES[name]
    states = []
    for _ in range(2):
        torch.manual_seed(4)
        states.append(make().state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    net = make()
    out = net(torch.zeros(0, N))
    assert out.shape == (0, N)
    out.sum().backward()
    with torch.device("meta"):
        described = make()
    for module in described.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    assert torch.isfinite(described(torch.ones(2, N))).all()


def test_sizes_below_one_are_named() -> None:
    for make, setting in (
        (lambda: CrossNet(3, 0), "num_layers=0"),
        (lambda: LowRankCrossNet(3, 1, 0), "low_rank=0"),
        (lambda: VectorCrossNet(0, 1), "in_features=0"),
        (lambda: LowRankMixtureCrossNet(3, 1, 0), "num_experts=0"),
    ):
        with pytest.raises(ValueError, match=f"{setting} must be at least 1"):
            make()


def test_pairwise_sum_adds_every_pair_once() -> None:
    vectors = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i + 1, 5)]
    torch.testing.assert_close(pairwise_sum(vectors), torch.stack(pairs).sum(0), atol=1e-5, rtol=1e-4)


def test_swish_layer_norm_gates_by_its_own_norm() -> None:
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    centred = inputs - inputs.mean(1, keepdim=True)
    normed = centred / (inputs.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(SwishLayerNorm(6)(inputs), inputs * torch.sigmoid(normed))


def test_an_mlp_has_the_layers_it_was_asked_for() -> None:
    assert [type(layer).__name__ for layer in MLP(3, [4, 2]).layers] == ["Linear", "ReLU"] * 2
    logit = MLP(3, [4, 1], dropout=0.5, activation=nn.Tanh, last_linear=True).layers
    assert [type(layer).__name__ for layer in logit] == ["Linear", "Tanh", "Dropout", "Linear"]
    assert MLP(3, [4, 2])(torch.zeros(0, 3)).shape == (0, 2)
    assert all(layer.bias is None for layer in MLP(3, [4], bias=False, activation=None).layers)
