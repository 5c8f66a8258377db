"""Forked children do not have their parent's threads: compiled loops and routing start their own there."""

from __future__ import annotations

import os
from pathlib import Path

from tests.forked import run_forked

# In a process of its own: forking one with pytest's threads is another test.
FORKS = """
import multiprocessing
import os

import numpy as np
import torch

from rayrec._runtime.numba_loops import MIN_IDS, in_threads
from rayrec.distributed.ids.count_loop import count
from rayrec.distributed.ids.input_dist import _router


def use():
    sizes, total_S = np.array([MIN_IDS, 3 * MIN_IDS]), np.zeros(2, np.int64)
    values = np.arange(sizes.sum(), dtype=np.uint64) % 100
    tables = np.array([0, 1]), np.array([1, 1]), np.array([100, 100], np.uint64)
    edges, streams = np.array([[0, 100], [0, 100]], np.uint64), np.array([[0, -1], [1, -1]])
    first_K = np.array([0, *sizes.cumsum()])
    assert in_threads(count, sizes, (values, first_K), tables, (edges, streams, total_S)) == -1
    assert total_S.tolist() == sizes.tolist()
    return _router().submit(os.getpid).result()


def in_children(depth, answers):
    answers.append(use())
    if depth:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=lambda: theirs.send(in_children(depth - 1, [])))
        child.start()
        answered = ours.poll(60)
        if not answered:
            child.kill()
        assert answered, f"the child at depth {depth} does not answer"
        answers += ours.recv()
        child.join()
    return answers


torch.set_num_threads(2)
print(len(set(in_children(2, []))), "processes")
"""


def test_compiled_loops_work_in_forked_children_and_their_children(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = run_forked(script, tmp_path, os.environ, timeout_s=180)
    assert done.stdout == "3 processes\n", done.stdout + done.stderr
