"""Runs Python programs in processes that are forked from the server of `tests.ranks`.

That server has imported torch and fbgemm once, which takes a new interpreter several seconds. Programs whose imports,
signals or exit are tested need an interpreter of their own.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ranks import SERVER


def run_forked(
    words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` returns for `python WORDS`, with its output as text.

    Args:
        words: `-W FILTER` any number of times, then `-m MODULE`, `-c CODE` or a file, then arguments.

    Raises:
        subprocess.TimeoutExpired: The program, which is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = SERVER.Process(target=_run, args=(list(words), str(cwd), dict(env or os.environ), str(out), str(err)))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout_s, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(list(words), process.exitcode, out.read_text(), err.read_text())


def _run(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    while words[0] == "-W":
        action, _, category, module = [*words[1].split(":"), "", "", ""][:4]
        kind = getattr(sys.modules["builtins"], category or "Warning")
        warnings.filterwarnings(action, category=kind, module=module)
        words = words[2:]
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], cwd
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
