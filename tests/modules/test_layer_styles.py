"""Activations, normalizations and vectors of numbers follow their formulas, with any shape of an example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rayrec.modules import MLP
from rayrec.modules.activation import ACTIVATIONS, Dice, LayerStyle, PReLU
from rayrec.modules.experts import ParallelMLPs
from rayrec.modules.norm import BatchNorm, LayerNorm
from rayrec.modules.numbers import EncodedVectors, LinearVectors, Periodic, PiecewiseLinear


def randomize(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def test_batch_norm_is_torchs_in_training_and_afterwards() -> None:
    torch.manual_seed(0)
    ours, theirs = randomize(BatchNorm((6,))), nn.BatchNorm1d(6)
    theirs.load_state_dict({**ours.state_dict(), "num_batches_tracked": torch.tensor(0)})
    for rows in (5, 1000, 2):
        results = []
        x = torch.randn(rows, 6) * 3 + 100
        for norm in (ours, theirs):
            given = x.clone().requires_grad_()
            out = norm(given)
            results.append([out, *torch.autograd.grad(out.sin().sum(), [given, norm.weight, norm.bias])])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    before = ours.running_mean.clone()
    assert ours.train()(x[:0]).shape == (0, 6) and torch.equal(ours.running_mean, before), "no rows change nothing"


def test_dice_and_prelu_follow_their_formulas() -> None:
    torch.manual_seed(0)
    dice, prelu, x = randomize(Dice((2, 3))), randomize(PReLU((2, 3))), torch.randn(7, 2, 3) * 2 + 1
    p = 1 / (1 + torch.exp(-(x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-8).sqrt()))
    torch.testing.assert_close(dice(x), p * x + (1 - p) * dice.alpha * x)
    dice.eval()
    p = torch.sigmoid((x - dice.norm.running_mean) / (dice.norm.running_var + 1e-8).sqrt())
    torch.testing.assert_close(dice(x), p * x + (1 - p) * dice.alpha * x)
    torch.testing.assert_close(prelu(x), x.clamp(min=0) + prelu.alpha * x.clamp(max=0))


@pytest.mark.parametrize("norm", [None, "batch", "layer"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_experts_have_the_layers_of_single_networks(activation: str, norm: str | None) -> None:
    """Linear, normalization, activation: E networks together are E `MLP`s with the same parameters."""
    torch.manual_seed(0)
    style = LayerStyle(activation=activation, norm=norm)
    together = ParallelMLPs(3, 4, [5, 6], style=style)
    x = torch.randn(9, 4)
    found = together([x] * 3)
    for expert in range(3):
        alone = MLP(4, [5, 6], activation=activation, norm=norm)
        for layer, weight, bias in zip(alone._mlp, together.weights, together.biases, strict=True):
            layer._linear.weight.data, layer._linear.bias.data = weight.data[expert].T, bias.data[expert, 0]
        torch.testing.assert_close(found[:, expert], alone(x), atol=1e-5, rtol=1e-5)


def test_an_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="unknown norm 'bach'; use one of batch, layer"):
        MLP(3, [4], activation="relu", norm="bach")


def test_layer_norm_of_experts_is_torchs_one_by_one() -> None:
    norm, x = randomize(LayerNorm((2, 4))), torch.randn(5, 2, 4)
    for expert in range(2):
        want = nn.functional.layer_norm(x[:, expert], (4,), norm.weight[expert], norm.bias[expert])
        torch.testing.assert_close(norm(x)[:, expert], want)


def test_vectors_of_numbers_follow_the_paper() -> None:
    torch.manual_seed(0)
    x = torch.rand(6, 2) * 1.4 - 0.2
    linear = LinearVectors(2, 3)
    periodic = EncodedVectors(Periodic(2, 4, sigma=2.0), 2, 8, 3)
    edges = [0.0, 0.25, 0.5, 0.75, 1.0]
    piecewise = EncodedVectors(PiecewiseLinear(4), 2, 4, 3)
    for row in range(6):
        for n in range(2):
            value = float(x[row, n])
            torch.testing.assert_close(linear(x)[row, n], value * linear.weight_ND[n] + linear.bias_ND[n])
            angles = 2 * math.pi * value * periodic.encode.frequency_NK[n]
            bins = [min(max((value - a) / (b - a), 0.0), 1.0) for a, b in zip(edges, edges[1:], strict=False)]
            for module, encoded in (
                (periodic, torch.cat([angles.sin(), angles.cos()])),
                (piecewise, torch.tensor(bins)),
            ):
                want = torch.relu(encoded @ module.weight_NKD[n] + module.bias_N1D[n, 0])
                torch.testing.assert_close(module(x)[row, n], want, atol=1e-5, rtol=1e-5)
