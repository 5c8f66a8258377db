"""The package's own tests on pretended GPUs, with 2 and 4 real gloo ranks (see `tests/dryrun`): a few always, all where
time is no matter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

FILES = [
    "tests/distributed/test_equality.py",
    "tests/distributed/test_embedding.py",
    "tests/distributed/test_dense.py",
    "tests/distributed/test_dedup.py",
    "tests/distributed/test_hierarchical.py",
    "tests/distributed/test_variable_batch.py",
    "tests/distributed/test_model_parallel.py",
]
ALWAYS = [
    "tests/distributed/test_equality.py::test_ranks_may_bring_batches_of_different_size",
    "tests/distributed/test_embedding.py::test_mixed_plans_equal_one_process",
    "tests/distributed/test_model_parallel.py::test_every_parameter_equals_one_process_on_the_global_batch[mixed-4]",
    "tests/distributed/test_model_parallel.py::test_a_step_costs_a_constant_number_of_collectives_whatever_the_plan",
    "tests/distributed/test_hierarchical.py::test_a_vector_leaves_its_host_once",
    "tests/distributed/test_hierarchical.py::test_weights_of_ids_get_their_gradients",
    "tests/checkpoint/test_store.py::test_training_goes_on_under_another_plan_and_world[worlds0-rw-cw]",
    "tests/checkpoint/test_store.py::test_state_of_other_optimizers_comes_along[adam]",
]


def run(*selection: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *selection]
    env = os.environ | {"RAYREC_PRETEND_GPUS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_a_selection_passes() -> None:
    run(*ALWAYS)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_they_pass(file: str) -> None:
    run(file)
