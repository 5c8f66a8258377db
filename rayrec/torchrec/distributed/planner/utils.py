"""Helpers of `torchrec.distributed.planner.utils`."""

from __future__ import annotations

from rayrec.torchrec.distributed.planner.parts import Proposal
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["bytes_to_gb", "bytes_to_mb", "gb_to_bytes", "mb_to_bytes", "reset_shard_rank", "sharder_name"]


def bytes_to_gb(num_bytes: int) -> float:
    """Convert bytes to GiB."""
    return num_bytes / (1 << 30)


def bytes_to_mb(num_bytes: float) -> float:
    """Convert bytes to MiB."""
    return num_bytes / (1 << 20)


def gb_to_bytes(gb: float) -> int:
    """Convert GiB to bytes."""
    return int(gb * (1 << 30))


def mb_to_bytes(mb: float) -> int:
    """Convert MiB to bytes."""
    return int(mb * (1 << 20))


def sharder_name(t: type) -> str:
    """Return the module and name of a type."""
    return f"{t.__module__}.{t.__name__}"


def reset_shard_rank(proposal: Proposal) -> None:
    """Remove the ranks of all shards."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None
