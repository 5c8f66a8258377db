"""The products of `Linear` against those of `nn.Linear`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayrec.modules import onednn_linear
from rayrec.modules.onednn_linear import Linear

BATCH, IN, OUT = 512, 70, 48


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplied; on any processor that has it."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(onednn_linear, "_mkl_is_slow", lambda: True)
    seen: list[tuple[int, ...]] = []
    forward = onednn_linear._Linear.forward
    monkeypatch.setattr(
        onednn_linear._Linear,
        "forward",
        staticmethod(lambda ctx, x, w, b: (seen.append(tuple(x.shape)), forward(ctx, x, w, b))[1]),
    )
    return seen


def both(bias: bool) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours, torchs = Linear(IN, OUT, bias=bias), nn.Linear(IN, OUT, bias=bias)
    torchs.load_state_dict(ours.state_dict())
    return ours, torchs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["plain", "strided", "transposed"])
def test_results_and_gradients_are_those_of_torch(used: list[tuple[int, ...]], bias: bool, layout: str) -> None:
    ours, torchs = both(bias)
    given = {
        "plain": torch.randn(BATCH, IN),
        "strided": torch.randn(BATCH, 2 * IN)[:, ::2],
        "transposed": torch.randn(IN, BATCH).t(),
    }[layout]
    grads = []
    for module in (ours, torchs):
        inputs = given.detach().requires_grad_()
        out = module(inputs)
        (out.sum() + (out[:, :5] ** 2).sum()).backward()
        grads.append([out.detach(), inputs.grad, *(param.grad for param in module.parameters())])
    assert used == [(BATCH, IN)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_gradient_that_does_not_lie_in_memory(used: list[tuple[int, ...]]) -> None:
    ours, torchs = both(True)
    given = torch.randn(BATCH, IN)
    for module in (ours, torchs):
        module(given).sum().backward()  # one number for all
    assert used
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad, rtol=1e-5, atol=1e-4)


def test_a_gradient_of_a_gradient(used: list[tuple[int, ...]]) -> None:
    ours, torchs = both(True)
    given = torch.randn(BATCH, IN)
    for module in (ours, torchs):
        inputs = given.clone().requires_grad_()
        (first,) = torch.autograd.grad((module(inputs) ** 2).sum(), inputs, create_graph=True)
        (first**2).sum().backward()
    assert used
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad, rtol=1e-4, atol=1e-2)


def test_everything_but_training_in_float32_is_torchs(used: list[tuple[int, ...]]) -> None:
    ours, torchs = both(True)
    given = torch.randn(BATCH, IN)
    with torch.no_grad():
        assert torch.equal(ours(given), torchs(given))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(given).dtype == torch.bfloat16
    assert torch.equal(ours(given[:3]), torchs(given[:3]))
    assert torch.equal(ours.double()(given.double()), torchs.double()(given.double()))
    ours.float()
    graph = torch.export.export(ours, (given,)).graph
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["linear"]
    params = dict(ours.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(ours, p, given).sum())(params)
    assert used == []
