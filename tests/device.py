"""Where sharded tables are tested: on the CPU, or a pretended GPU (`RAYREC_PRETEND_GPUS=1`, see `tests/dryrun`)."""

from __future__ import annotations

import os

import torch

PRETENDED = bool(os.environ.get("RAYREC_PRETEND_GPUS"))
DEVICE = torch.device("cuda", 0) if PRETENDED else torch.device("cpu")
