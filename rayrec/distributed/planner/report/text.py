"""Numbers, bars and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

BAR = "█"
PARTS = " ▏▎▍▌▋▊▉"
LIGHT = "░"


def human_bytes(count: float) -> str:
    """Formats bytes in the largest binary unit that is at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Formats seconds in s, ms or us."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def bar(share: float, width: int = 20, light: float = 0.0) -> str:
    """A bar of `share` of `width` characters, followed by a lighter bar of share `light`."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, remainder = divmod(eighths, 8)
    filled = BAR * full + (PARTS[remainder] if remainder else "")
    return (filled + LIGHT * min(round(light * width), width - len(filled))).ljust(width)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """A plain table; columns with numbers in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in [head, ["-" * w for w in widths], *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)
