"""Processor instructions: what this machine has, what a compiled graph needs, and what a number format is fast with."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

from rayrec.inference.artifact import ExportError

CPUINFO = Path("/proc/cpuinfo")
NATIVE = "native"

# Flags of /proc/cpuinfo, by level of the x86-64 psABI. Servers have the third since 2013 (Intel) and 2017 (AMD).
_SECOND = {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}
_LEVELS = {"x86-64-v3": _SECOND | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}}
_VECTOR_BITS = {"x86-64-v3": 256}
# What compilers emit for arithmetic; the other flags say how a kernel or a hypervisor uses the processor.
_EMITTED = re.compile(
    "avx|amx|apx|sse|pni|fma|f16c|bmi|abm|movbe|popcnt|xop|tbm|adx|cx16|lahf|aes|pclmul|gfni|sha|xsave"
)
# Any one of a format's sets of flags makes it fast: x86's or ARM's.
_FAST_WITH = {
    "bf16": ({"avx512_bf16"}, {"amx_bf16"}, {"bf16"}),
    "int8": ({"avx2"}, {"asimd"}),
    "int4": ({"avx2"}, {"asimd"}),
}


def flags_here() -> frozenset[str]:
    """The flags of this machine's processor; none where the system does not list them."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset() if found is None else frozenset(found[1].split())


def choose_march(wanted: str | None) -> str:
    """The instruction set to compile for; by default a level that other processors have as well, if there is one.

    Raises:
        ExportError: it cannot be compiled for here.
    """
    from torch._inductor import config

    levels = _LEVELS if platform.machine() == "x86_64" and hasattr(config.cpp, "march") else ()  # torch 2.11 has none
    allowed = [*levels, NATIVE]
    if wanted is not None and wanted not in allowed:
        raise ExportError(f"--march {wanted}: this machine and torch compile for {' or '.join(allowed)}")
    return wanted or allowed[0]


def instructions_of(march: str) -> list[str]:
    """The flags that a graph compiled for `march` needs, sorted; of "native", what this processor has."""
    if march != NATIVE:
        return sorted(_LEVELS[march])
    here = flags_here()
    return sorted(filter(_EMITTED.search, here) if platform.machine() == "x86_64" else here)


def vector_bits(march: str) -> int | None:
    """Width of the vectors to compile for; None: the widest of this processor."""
    return _VECTOR_BITS.get(march)


def missing(instructions: Iterable[str]) -> list[str]:
    """Those that this processor lacks, sorted."""
    return sorted(set(instructions) - flags_here())


def why_slow(formats: Iterable[str]) -> str | None:
    """Which of some number formats this processor has no instructions for, and what it lacks; None: it has all."""
    here = flags_here()
    for name in sorted(set(formats) & set(_FAST_WITH)):
        if not any(needed <= here for needed in _FAST_WITH[name]):
            lacks = " or ".join(flag for needed in _FAST_WITH[name] for flag in sorted(needed))
            return f"this processor has no instructions for {name} (it lacks {lacks}): several times slower than fp32"
    return None
