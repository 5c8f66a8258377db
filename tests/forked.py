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
from collections.abc import Mapping
from pathlib import Path

from tests.ranks import SERVER


def run_forked(
    script: Path, cwd: Path, env: Mapping[str, str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` returns for `python SCRIPT`, with its output as text. Its deprecation warnings are errors.

    Raises:
        subprocess.TimeoutExpired: The program, which is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = SERVER.Process(target=_run, args=(str(script), str(cwd), dict(env), str(out), str(err)))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(str(script), timeout_s, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(str(script), process.exitcode, out.read_text(), err.read_text())


def _run(script: str, cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
