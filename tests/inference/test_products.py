"""Products in another form before a graph is compiled: the same results, and only where they are what they seem."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from rayrec.inference.compilation import MAX_VECTORS, rewrite_slow_products
from rayrec.models.interaction import InteractionArch
from rayrec.modules import MLP

ONEDNN = platform.machine() == "x86_64" and torch.backends.mkldnn.is_available()


class Interacting(nn.Module):
    def __init__(self, features: int, dim: int = 8) -> None:
        super().__init__()
        self.features, self.dim = features, dim
        self.interaction = InteractionArch(features)
        self.over = MLP(dim + features * (features + 1) // 2, [1024, 512, 1], activation_on_last=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = vectors.view(-1, self.features + 1, self.dim)
        made: torch.Tensor = self.over(self.interaction(vectors[:, 0], vectors[:, 1:]))
        return made


def program_of(module: nn.Module, width: int) -> ExportedProgram:
    return torch.export.export(
        module.eval(), (torch.zeros(3, width),), dynamic_shapes=({0: Dim("rows", min=1, max=1 << 24)},), strict=False
    )


def targets(program: ExportedProgram) -> list[Any]:
    """Of the nodes that something uses."""
    return [node.target for node in program.graph.nodes if node.op == "call_function" and node.users]


@pytest.mark.parametrize("features", [1, 26, MAX_VECTORS - 1])
def test_the_results_stay_the_same(features: int) -> None:
    torch.manual_seed(0)
    program = program_of(Interacting(features), (features + 1) * 8)
    inputs = [torch.randn(rows, (features + 1) * 8) for rows in (1, 2, 100)]
    with torch.no_grad():
        before = [program.module()(one) for one in inputs]
        rewrite_slow_products(program)
        after = [program.module()(one) for one in inputs]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert torch.ops.aten.index_select.default not in targets(program)
    # 512 x 1 is not large, the first layer where it has enough inputs
    large = 1 + (1024 * (8 + features * (features + 1) // 2) >= 1 << 17)
    assert targets(program).count(torch.ops.mkldnn._linear_pointwise.default) == (large if ONEDNN else 0)


class Other(nn.Module):
    """What looks like pairs: of other places, of two tensors, of too many vectors, in half precision."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        count = MAX_VECTORS + 1 if kind == "many" else 5
        rows, columns = torch.triu_indices(count, count, offset=0 if kind == "diagonal" else 1)
        self.register_buffer("pairs", rows * count + columns)
        self.count, self.kind = count, kind

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = vectors.view(-1, self.count, 4)
        if self.kind == "half":
            vectors = vectors.bfloat16()
        other = vectors.flip(1) if self.kind == "two" else vectors
        products = torch.bmm(vectors, other.transpose(1, 2)).flatten(1).index_select(1, self.pairs)  # type: ignore[arg-type]
        return products.float()


@pytest.mark.parametrize("kind", ["diagonal", "two", "many", "half"])
def test_what_only_looks_like_pairs_stays(kind: str) -> None:
    module = Other(kind)
    program = program_of(module, module.count * 4)
    given = torch.randn(3, module.count * 4)
    rewrite_slow_products(program)
    assert torch.ops.aten.index_select.default in targets(program)
    torch.testing.assert_close(program.module()(given), module(given), rtol=0, atol=0)
