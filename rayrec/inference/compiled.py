"""Graphs on disk: torch.export's, and AOTInductor's compiled package, unpacked into a folder.

Matrix products that are slow in torch's own form are given another one before a graph is compiled.
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
ONEDNN_WEIGHTS = 1 << 17  # of a layer: with fewer, a call of oneDNN, of 10 microseconds, is much of a small batch
MOST_VECTORS = 64  # that are paired by rows: each is a loop of its own to the compiler

aten: Any = torch.ops.aten
Node = Any  # of torch.fx, whose types allow each argument to be anything


def save_graph(program: ExportedProgram, path: Path) -> None:
    """Raw tensors and JSON: nothing that is executed when it is read."""
    inputs, program.example_inputs = program.example_inputs, None  # would be pickled
    try:
        torch.export.save(program, path)
    finally:
        program.example_inputs = inputs


def load_graph(path: Path) -> Run:
    """
    Raises:
        ExportError: the file is not a graph that this torch reads.
    """
    try:
        module = torch.export.load(path).module()
    except Exception as error:
        raise ExportError(f"{path} cannot be loaded by torch {torch.__version__}: {error}; export anew") from error

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = module(*arguments)
        return logits

    return run


def check_compiler() -> None:
    """
    Raises:
        ExportError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        text = f"--target aoti compiles C++, and no {compiler} is here: install it, or export with --target eager"
        raise ExportError(text)


def compile_graph(program: ExportedProgram, folder: Path, march: str) -> None:
    """Compiles for processors with the instructions of `march`, for whatever number of threads it is run with; the
    program cannot be saved afterwards.

    Raises:
        ExportError: there is no C++ compiler, or it fails.
    """
    check_compiler()
    without_slow_products(program)
    options: dict[str, Any] = {"cpp.dynamic_threads": True, "freezing": False}
    if march != NATIVE:
        options |= {"cpp.march": march, "cpp.simdlen": vector_bits(march)}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".aoti-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        package = str(Path(scratch) / "model.pt2")
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        except Exception as error:
            raise ExportError(f"AOTInductor cannot compile the model: {error}") from error
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                inside = name.split("/", 1)[1]
                if inside and not inside.endswith((".cpp", "/")):
                    target = folder / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))


def load_compiled(folder: Path) -> Run:
    """
    Raises:
        ExportError: the package is not one that this torch loads.
    """
    logging.getLogger("torch.export.pt2_archive").setLevel(logging.ERROR)
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(folder), "model", False, 1, -1)  # one call at a time
    except Exception as error:
        raise ExportError(f"{folder} cannot be loaded by torch {torch.__version__}: {error}; export anew") from error

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return loader.run(list(arguments))[0]

    return run


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
