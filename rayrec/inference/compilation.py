"""Saves, loads and compiles graphs: torch.export files, and AOTInductor packages unpacked into a folder.

Before compilation, matrix products that torch computes slowly on AMD processors are rewritten.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from rayrec.inference.artifact import ExportError
from rayrec.inference.processor import NATIVE, vector_bits

Run = Callable[[Sequence[torch.Tensor]], torch.Tensor]
# A call of oneDNN costs 10 microseconds: for smaller layers, that is much of the time of a small batch.
MIN_ONEDNN_WEIGHTS = 1 << 17
MAX_VECTORS = 64  # the compiler generates a loop per vector for pairwise products

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node; its argument types are unions of everything


def save_graph(program: ExportedProgram, path: Path) -> None:
    """Saves a graph as raw tensors and JSON, without code or pickles."""
    inputs, program.example_inputs = program.example_inputs, None  # they would be pickled
    try:
        torch.export.save(program, path)
    finally:
        program.example_inputs = inputs


def load_graph(path: Path) -> Run:
    """
    Raises:
        ExportError: This torch cannot load the file.
    """
    try:
        module = torch.export.load(path).module()
    except Exception as error:
        raise ExportError(f"{path} cannot be loaded by torch {torch.__version__}: {error}; export again") from error
    # `Model` checks its inputs; torch's check of each symbolic size takes a fifth of the time of a small batch.
    module.validate_inputs = False  # type: ignore[assignment]

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = module(*arguments)
        return logits

    return run


def check_compiler() -> None:
    """
    Raises:
        ExportError: The C++ compiler is missing.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        text = f"--target aoti needs a C++ compiler, and {compiler} is missing: install it, or use --target eager"
        raise ExportError(text)


def compile_graph(program: ExportedProgram, folder: Path, march: str) -> None:
    """Compiles a graph for the instruction set `march` and any number of threads; `program` cannot be saved afterwards.

    Raises:
        ExportError: The C++ compiler is missing, or fails.
    """
    check_compiler()
    rewrite_slow_products(program)
    options: dict[str, Any] = {"cpp.dynamic_threads": True, "freezing": False}
    if march != NATIVE:
        options |= {"cpp.march": march, "cpp.simdlen": vector_bits(march)}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".aoti-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        package = str(Path(scratch) / "model.pt2")
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        except Exception as error:
            raise ExportError(f"AOTInductor cannot compile the model: {error}") from error
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                relative = name.split("/", 1)[1]
                if relative and not relative.endswith((".cpp", "/")):
                    target = folder / relative
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))


def load_compiled(folder: Path) -> Run:
    """
    Raises:
        ExportError: This torch cannot load the package.
    """
    logging.getLogger("torch.export.pt2_archive").setLevel(logging.ERROR)
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(
            str(folder), "model", False, 1, -1
        )  # one runner: calls are serialized
    except Exception as error:
        raise ExportError(f"{folder} cannot be loaded by torch {torch.__version__}: {error}; export again") from error

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return loader.run(list(arguments))[0]

    return run


def rewrite_slow_products(program: ExportedProgram) -> None:
    """Rewrites matrix products in place; results change by rounding only. The program cannot be saved afterwards.

    On AMD processors, MKL needs twice the time of oneDNN for float32 layers, and three times the time of plain
    loops for the pairwise products of a few vectors.
    """
    graph = program.graph
    onednn = platform.machine() == "x86_64" and torch.backends.mkldnn.is_available()
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = node.args[1].meta["val"]
        if onednn and weight.dtype == torch.float32 and weight.numel() >= MIN_ONEDNN_WEIGHTS:
            node.target = torch.ops.mkldnn._linear_pointwise.default
            node.args = (*node.args[:2], node.args[2] if len(node.args) > 2 else None, "none", [], "")
    for node in graph.find_nodes(op="call_function", target=aten.index_select.default):
        vectors = _paired(node, program)
        if vectors is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_by_rows(vectors))
    program.graph_module.recompile()


def _paired(node: Node, program: ExportedProgram) -> Node | None:
    """The vectors `[B, N, D]` if the node computes the pairwise products of `InteractionArch`, else None."""
    flat, dim, pairs = node.args
    product = flat.args[0] if flat.target is aten.flatten.using_ints else None
    if dim != 1 or product is None or product.target is not aten.bmm.default:
        return None
    vectors, transposed = product.args
    if transposed.target is not aten.transpose.int or transposed.args != (vectors, 1, 2):
        return None
    count, dtype = vectors.meta["val"].shape[1], vectors.meta["val"].dtype
    if dtype != torch.float32 or not isinstance(count, int) or count > MAX_VECTORS:
        return None
    rows, columns = torch.triu_indices(count, count, offset=1)
    buffers = program.graph_signature.inputs_to_buffers
    pair_indices = {**program.state_dict, **program.constants}.get(buffers.get(pairs.name, ""))
    expected = rows * count + columns
    return vectors if pair_indices is not None and torch.equal(pair_indices, expected) else None


def _by_rows(vectors: Node) -> Node:
    """`[B, N (N - 1) / 2]`: the products of each vector with all later ones."""
    graph, count = vectors.graph, vectors.meta["val"].shape[1]
    columns = []
    for row in range(count - 1):
        vector = graph.call_function(aten.slice.Tensor, (vectors, 1, row, row + 1))
        later = graph.call_function(aten.slice.Tensor, (vectors, 1, row + 1, count))
        products = graph.call_function(aten.mul.Tensor, (vector, later))
        columns.append(graph.call_function(aten.sum.dim_IntList, (products, [-1])))
    return graph.call_function(aten.cat.default, (columns, 1))
