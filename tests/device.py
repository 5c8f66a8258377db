"""Where sharded tables are tested: on the CPU, or a pretended GPU (`RAYREC_PRETEND_GPUS=1`, see `tests/dryrun`)."""

from __future__ import annotations

import os

import torch

PRETENDED = bool(os.environ.get("RAYREC_PRETEND_GPUS"))
DEVICE = torch.device("cuda", 0) if PRETENDED else torch.device("cpu")


def drawn(examples: int) -> int:
    """How many problems a property is tried on: fewer on a pretended GPU, as the CPU's run tries it, too."""
    return examples // 5 if PRETENDED else examples


def exchanges(on_cpus: int) -> dict[str, int]:
    """What a step costs on the device, and on its hosts, that costs so many exchanges on CPU ranks.

    For GPUs sizes are known before ids leave: these never take two exchanges, and none where there are no ids.
    """
    if not PRETENDED:
        return {"all_to_all": on_cpus}
    return {"exchange_on_hosts": 1} | ({"all_to_all": on_cpus - (on_cpus % 2 == 0)} if on_cpus > 1 else {})
