"""The package's own tests on pretended GPUs, with real gloo ranks (see `tests/dryrun`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

FILES = {
    "tests/distributed/test_equality.py": "",
    # gradients of weights that a user has on the host: autograd knows that they cross streams, which are pretended here
    "tests/distributed/test_dedup.py": "not never_travel",
    "tests/distributed/test_variable_batch.py": "",
}


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_they_pass(file: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", file]
    command += ["-k", FILES[file]] if FILES[file] else []
    env = os.environ | {"RAYREC_PRETEND_GPUS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:]
