"""Cross networks, MLP and activations against the papers' formulas, spelled out example by example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rayrec.models.deepfm import pairwise_sum
from rayrec.modules import MLP, CrossNet, LowRankCrossNet, SwishLayerNorm
from rayrec.torchrec.modules.crossnet import LowRankMixtureCrossNet, VectorCrossNet

N, LAYERS = 5, 3


def full(net: CrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for kernel, bias in zip(net.kernels, net.bias, strict=True):
        x = x0 * (kernel @ x + bias.view(-1)) + x
    return x


def low_rank(net: LowRankCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for up, down, bias in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        x = x0 * (up @ (down @ x) + bias) + x
    return x


def vector(net: VectorCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for w, b in zip(net.kernels, net.bias, strict=True):
        x = torch.outer(x0, x) @ w.view(-1) + b.view(-1) + x
    return x


def mixture(net: LowRankMixtureCrossNet, x0: torch.Tensor) -> torch.Tensor:
    x = x0
    for up_KNR, down_KRN, core_KRR, bias in zip(net.U_kernels, net.V_kernels, net.C_kernels, net.bias, strict=True):
        experts = []
        for up, down, core in zip(up_KNR, down_KRN, core_KRR, strict=True):
            experts.append(x0 * (up @ torch.relu(core @ torch.relu(down @ x)) + bias.view(-1)))
        shares = torch.ones(1)
        if net.gates is not None:
            shares = torch.softmax(torch.cat([gate.weight @ x for gate in net.gates]), dim=0)
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
    def kinds(mlp: MLP) -> list[str]:
        return [getattr(layer._activation_fn, "__name__", type(layer._activation_fn).__name__) for layer in mlp._mlp]

    assert kinds(MLP(3, [4, 2])) == ["relu", "relu"]
    assert kinds(MLP(3, [4, 1], activation=nn.Tanh, activation_on_last=False)) == ["Tanh", "Identity"]
    shared = nn.PReLU()
    assert {id(layer._activation_fn) for layer in MLP(3, [4, 4], activation=shared)._mlp} == {id(shared)}
    own = MLP(3, [4, 4], activation=lambda: nn.PReLU())._mlp
    assert own[0]._activation_fn is not own[1]._activation_fn
    assert MLP(3, [4, 2])(torch.zeros(0, 3)).shape == (0, 2)
    assert all(layer._linear.bias is None for layer in MLP(3, [4], bias=False)._mlp)
    with pytest.raises(ValueError, match="unknown activation 'gellu'"):
        MLP(3, [4], activation="gellu")


def test_dropout_comes_after_activations_and_not_after_logits() -> None:
    torch.manual_seed(0)
    net = MLP(2, [64, 1], activation_on_last=False, dropout=0.5)
    inputs = torch.ones(50, 2)
    assert net(inputs).std() > 0 and (net(inputs) != 0).all()
    assert (MLP(2, [64], dropout=0.5, activation="sigmoid")(inputs) == 0).float().mean() > 0.3
    net.eval()
    assert net(inputs).std() < 1e-6
