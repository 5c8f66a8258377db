"""Collectives and process groups: the only package that calls torch.distributed's collectives."""

from rayrec.distributed.comm.collectives import (
    Group,
    Wait,
    all_gather,
    all_gather_uneven,
    all_reduce,
    all_to_all,
    broadcast,
    combine,
    count_bytes,
    count_collectives,
    exchange_in_place,
    exchange_messages,
    exchange_on_hosts,
    link_of,
    sum_on_rank_0,
)
from rayrec.distributed.comm.gather import gather_rows
from rayrec.distributed.comm.groups import host_group, leave, subgroup
from rayrec.distributed.comm.objects import (
    all_gather_object,
    barrier,
    broadcast_object,
    call_on_rank,
    combine_objects,
    gather_object,
    scatter_object,
)

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
    "combine",
    "combine_objects",
    "count_bytes",
    "count_collectives",
    "exchange_in_place",
    "exchange_messages",
    "exchange_on_hosts",
    "gather_object",
    "gather_rows",
    "host_group",
    "leave",
    "link_of",
    "scatter_object",
    "subgroup",
    "sum_on_rank_0",
]
