"""Instruction sets: of this processor, of a compiled graph, and of number formats."""

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
# Flags of instructions that compilers emit for arithmetic; other flags are for kernels and hypervisors.
_EMITTED = re.compile(
    "avx|amx|apx|sse|pni|fma|f16c|bmi|abm|movbe|popcnt|xop|tbm|adx|cx16|lahf|aes|pclmul|gfni|sha|xsave"
)
# A format is fast with any of its sets of flags, of x86 or ARM.
_FAST_WITH = {
    "bf16": ({"avx512_bf16"}, {"amx_bf16"}, {"bf16"}),
    "int8": ({"avx2"}, {"asimd"}),
    "int4": ({"avx2"}, {"asimd"}),
}


def processor_flags() -> frozenset[str]:
    """The flags of this machine's processor; empty if the system does not list them."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset() if match is None else frozenset(match[1].split())


def choose_march(march: str | None) -> str:
    """The instruction set to compile for; by default a level that most processors have, else "native".

    Raises:
        ExportError: This machine or torch does not support it.
    """
    from torch._inductor import config

    levels = _LEVELS if platform.machine() == "x86_64" and hasattr(config.cpp, "march") else ()  # torch 2.11 has none
    allowed = [*levels, NATIVE]
    if march is not None and march not in allowed:
        raise ExportError(f"--march {march}: this machine and torch support {' and '.join(allowed)}")
    return march or allowed[0]


def instructions_of(march: str) -> list[str]:
    """The flags that a graph compiled for `march` needs, sorted; for "native", the flags of this processor."""
    if march != NATIVE:
        return sorted(_LEVELS[march])
    flags = processor_flags()
    return sorted(filter(_EMITTED.search, flags) if platform.machine() == "x86_64" else flags)


def vector_bits(march: str) -> int | None:
    """Vector width in bits to compile for; None: the widest of this processor."""
    return _VECTOR_BITS.get(march)


def missing(instructions: Iterable[str]) -> list[str]:
    """The instructions that this processor lacks, sorted."""
    return sorted(set(instructions) - processor_flags())


def why_slow(formats: Iterable[str]) -> str | None:
    """Names a format that this processor lacks instructions for, and the instructions; None if it has all."""
    flags = processor_flags()
    for name in sorted(set(formats) & set(_FAST_WITH)):
        if not any(needed <= flags for needed in _FAST_WITH[name]):
            lacks = " or ".join(flag for needed in _FAST_WITH[name] for flag in sorted(needed))
            return f"this processor has no instructions for {name} (it lacks {lacks}): several times slower than fp32"
    return None
