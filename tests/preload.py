"""Imported once by the server that test processes are forked from."""

import os

if os.environ.get("RAYREC_PRETEND_GPUS"):
    import tests.dryrun.guard  # noqa: F401  (before torch)

import torch.distributed  # noqa: F401

import rayrec.train.worker.loop  # noqa: F401
from rayrec._runtime.numba_loops import loops
from rayrec.distributed.ids.sender import SPLIT_LOOPS

loops(SPLIT_LOOPS)  # compiled, or loaded, once for all
