"""Graphs on disk: torch.export's, and AOTInductor's compiled package, unpacked into a folder."""

from __future__ import annotations

import logging
import os
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
from rayrec.inference.products import without_slow_products

Run = Callable[[Sequence[torch.Tensor]], torch.Tensor]


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


def load_compiled(folder: Path, runners: int = 1) -> Run:
    """
    Args:
        runners: how many calls may run at the same time.

    Raises:
        ExportError: the package is not one that this torch loads.
    """
    logging.getLogger("torch.export.pt2_archive").setLevel(logging.ERROR)
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(folder), "model", False, runners, -1)
    except Exception as error:
        raise ExportError(f"{folder} cannot be loaded by torch {torch.__version__}: {error}; export anew") from error

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return loader.run(list(arguments))[0]

    return run
