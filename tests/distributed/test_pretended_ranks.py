"""The package's own tests on pretended GPUs, with 2 and 4 real gloo ranks (see `tests/dryrun`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

WHOLE = [  # those whose code asks for the device
    "tests/distributed/test_equality.py",
    "tests/distributed/test_gpu.py",
    "tests/distributed/test_dedup.py",
    "tests/distributed/test_hierarchical.py",
    "tests/distributed/test_variable_batch.py",
    "tests/distributed/test_model_parallel.py",
    "tests/distributed/test_optimizer_state.py",
    "tests/checkpoint/test_reshard.py",
    "tests/checkpoint/test_saving.py",
    "tests/checkpoint/test_state_device.py",
]
RETRIEVAL = "tests/models/test_retrieval.py::test_a_sharded_table_trains_as_one_process_does"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_they_pass() -> None:
    """All in one process, which takes long to start."""
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    tests = [*WHOLE, RETRIEVAL]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *tests]
    env = os.environ | {"RAYREC_PRETEND_GPUS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
