"""`torchrec.distributed.comm`: ranks of a host, and groups of hosts."""

from rayrec.distributed.comm import (
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_node_group_size,
    get_num_groups,
    intra_and_cross_node_pg,
)

__all__ = [
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_node_group_size",
    "get_num_groups",
    "intra_and_cross_node_pg",
]
