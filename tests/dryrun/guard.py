"""Compiles, once, and loads what makes torch believe it knows CUDA. Before torch is imported: it asks only once."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def load() -> None:
    """Raises RuntimeError where torch is imported already, or g++ is missing."""
    if "torch" in sys.modules:
        raise RuntimeError("tests.dryrun.guard must be loaded before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    home = spec.submodule_search_locations[0]
    ctypes.CDLL(f"{home}/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built(home)), mode=ctypes.RTLD_GLOBAL)


def built(home: str) -> Path:
    """The library, kept for this source and torch, whose headers take long to compile."""
    source = Path(__file__).with_name("guard.cpp")
    known_by = hashlib.sha256(source.read_bytes() + version("torch").encode()).hexdigest()[:16]
    library = Path(__file__).parents[2] / "build" / "dryrun" / f"guard-{known_by}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    places = [f"-I{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new = f"{folder}/guard.so"
        try:
            subprocess.run(["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, *places, "-o", new], check=True)
        except FileNotFoundError:
            raise RuntimeError("pretended GPUs need g++: install it, or leave these tests out") from None
        os.replace(new, library)
    return library


load()
