"""Joins files in processes that end themselves before each of their changes of a file: FOLDER SPEC COMMIT_ROWS."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rayrec.data import FileJoin, JoinSpec


def killed_before_each_change(folder: str, spec: JoinSpec, commit_rows: int) -> None:
    """Joins `log` and `events` into `out-N`, ending before change N, for all N until one is not reached.

    The processes are forks of this one, which has no threads yet.
    """
    for change in range(1, 500):
        child = os.fork()
        if not child:
            _join(Path(folder), f"out-{change}", spec, commit_rows, change)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("it was never done")


def _join(folder: Path, out: str, spec: JoinSpec, commit_rows: int, change: int) -> None:
    left = iter(range(change - 1))

    def watch(event: str, args: tuple[Any, ...]) -> None:
        is_change = event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove") and f"/{out}" in str(args[0])
        if is_change and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    with FileJoin(folder / "log", folder / "events", folder / out, spec, commit_rows=commit_rows) as join:
        join.run(final=True)


if __name__ == "__main__":
    of_spec = json.loads(sys.argv[2])
    killed_before_each_change(
        sys.argv[1], JoinSpec(**{**of_spec, "labels": tuple(of_spec["labels"])}), int(sys.argv[3])
    )
