"""`rayrec data sequence` as a call, for tests that look at what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayrec.data.tools.histories import Log, by_time, make_sequences
from rayrec.data.tools.times import TimeColumn


def write_histories(
    log: Path,
    out: Path,
    *columns: str,
    time: str = "at",
    time_format: str | None = None,
    split: tuple[Any, ...] | None = None,
    **more: Any,
) -> dict[Path, int]:
    """Rows by folder.

    Args:
        split: the first time of the test rows, and, if given, that of the validation rows.
    """
    which = Log(user="user", times=(TimeColumn(time, time_format),), columns=columns or ("item",))
    return make_sequences([str(log)], out, which, split=None if split is None else by_time(*split), **more)
