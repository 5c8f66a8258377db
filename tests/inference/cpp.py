"""Builds `deploy/cpp` in `build/cpp`, once for all test processes. Tests skip and name what is missing."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "deploy" / "cpp"
FOLDER = SOURCES.parents[1] / "build" / "cpp"
HEADERS = ("nlohmann/json.hpp", "blake2.h", "zlib.h")


def _missing() -> list[str]:
    tools = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if tools:
        return tools
    lines = "".join(f"#include <{name}>\n" for name in HEADERS)
    found = subprocess.run(
        ["g++", "-std=c++20", "-E", "-M", "-MG", "-x", "c++", "-"], input=lines, capture_output=True, text=True
    )
    words = found.stdout.split()
    return [name for name in HEADERS if name in words]  # a header that exists appears with its folder


needs_cpp = pytest.mark.skipif(
    bool(missing := _missing()), reason=f"deploy/cpp cannot be built, {missing} missing: make cpp-packages"
)


@cache
def built(target: str) -> Path:
    """The path of a program."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["cmake", "-S", SOURCES, "-B", FOLDER, f"-DPYTHON={sys.executable}"], check=True, timeout=200)
        subprocess.run(["cmake", "--build", FOLDER, "--target", target, "-j2"], check=True, timeout=600)
    return FOLDER / target
