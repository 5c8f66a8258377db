"""Imported once by the server that test processes are forked from."""

import torch.distributed  # noqa: F401

import rayrec.train.worker.loop  # noqa: F401
