"""Collectives and process groups: the only package that calls torch.distributed's collectives."""

from rayrec.distributed.comm.collectives import (
    Group,
    Wait,
    all_gather,
    all_gather_uneven,
    all_reduce,
    all_to_all,
    broadcast,
    count_bytes,
    count_collectives,
    exchange_messages,
    exchange_on_hosts,
    mean_of_gradients,
)
from rayrec.distributed.comm.groups import host_group, intra_and_cross_node_pg, leave, subgroup, world_rank
from rayrec.distributed.comm.local_ranks import (
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_node_group_size,
    get_num_groups,
)
from rayrec.distributed.comm.objects import all_gather_object, barrier, broadcast_object, call_on_rank

__all__ = [
    "Group",
    "Wait",
    "all_gather",
    "all_gather_object",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "call_on_rank",
    "count_bytes",
    "count_collectives",
    "exchange_messages",
    "exchange_on_hosts",
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_node_group_size",
    "get_num_groups",
    "host_group",
    "intra_and_cross_node_pg",
    "leave",
    "mean_of_gradients",
    "subgroup",
    "world_rank",
]
