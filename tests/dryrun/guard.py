"""Compiles and loads what makes torch believe that it knows CUDA. To be imported before torch, which asks only once."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def load() -> None:
    """Raises RuntimeError where torch is imported already, or g++ is missing."""
    if "torch" in sys.modules:
        raise RuntimeError("tests.dryrun.guard must be loaded before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    home = spec.submodule_search_locations[0]
    with tempfile.TemporaryDirectory(prefix="dryrun-") as folder:
        library = f"{folder}/guard.so"
        places = [f"-I{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-ltorch_cpu", "-lc10"]
        source = str(Path(__file__).with_name("guard.cpp"))
        try:
            subprocess.run(["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, *places, "-o", library], check=True)
        except FileNotFoundError:
            raise RuntimeError("pretended GPUs need g++: install it, or leave these tests out") from None
        ctypes.CDLL(f"{home}/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


load()
