"""Matrix products of a graph in a form that is fast where torch's own is slow, before the graph is compiled."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch.export import ExportedProgram

ONEDNN_WEIGHTS = 1 << 17  # of a layer: with fewer, a call of oneDNN, of 10 microseconds, is much of a small batch
MOST_VECTORS = 64  # that are paired by rows: each is a loop of its own to the compiler

aten: Any = torch.ops.aten
Node = Any  # of torch.fx, whose types allow each argument to be anything


def without_slow_products(program: ExportedProgram) -> None:
    """Changes the program, which cannot be saved afterwards; its results stay the same but for rounding.

    MKL, which torch asks, takes twice oneDNN's time for float32 layers on AMD processors, and three times that of plain
    loops for the pairwise products of a few vectors.
    """
    graph = program.graph
    onednn = platform.machine() == "x86_64" and torch.backends.mkldnn.is_available()
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = node.args[1].meta["val"]
        if onednn and weight.dtype == torch.float32 and weight.numel() >= ONEDNN_WEIGHTS:
            node.target = torch.ops.mkldnn._linear_pointwise.default
            node.args = (*node.args[:2], node.args[2] if len(node.args) > 2 else None, "none", [], "")
    for node in graph.find_nodes(op="call_function", target=aten.index_select.default):
        vectors = _paired(node, program)
        if vectors is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_by_rows(vectors))
    program.graph_module.recompile()


def _paired(node: Node, program: ExportedProgram) -> Node | None:
    """The vectors `[B, N, D]` of which `InteractionArch` takes all pairs, if a node does that."""
    flat, dim, pairs = node.args
    product = flat.args[0] if flat.target is aten.flatten.using_ints else None
    if dim != 1 or product is None or product.target is not aten.bmm.default:
        return None
    vectors, turned = product.args
    if turned.target is not aten.transpose.int or turned.args != (vectors, 1, 2):
        return None
    count, dtype = vectors.meta["val"].shape[1], vectors.meta["val"].dtype
    if dtype != torch.float32 or not isinstance(count, int) or count > MOST_VECTORS:
        return None
    rows, columns = torch.triu_indices(count, count, offset=1)
    buffers = program.graph_signature.inputs_to_buffers
    chosen = {**program.state_dict, **program.constants}.get(buffers.get(pairs.name, ""))
    return vectors if chosen is not None and torch.equal(chosen, rows * count + columns) else None


def _by_rows(vectors: Node) -> Node:
    """`[B, N (N - 1) / 2]`: the products of each vector with those after it."""
    graph, count = vectors.graph, vectors.meta["val"].shape[1]
    parts = []
    for place in range(count - 1):
        one = graph.call_function(aten.slice.Tensor, (vectors, 1, place, place + 1))
        later = graph.call_function(aten.slice.Tensor, (vectors, 1, place + 1, count))
        products = graph.call_function(aten.mul.Tensor, (one, later))
        parts.append(graph.call_function(aten.sum.dim_IntList, (products, [-1])))
    return graph.call_function(aten.cat.default, (parts, 1))
