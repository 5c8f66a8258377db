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
)
from rayrec.distributed.comm.gather import gather_rows
from rayrec.distributed.comm.groups import host_group, leave, subgroup
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
    "gather_rows",
    "host_group",
    "leave",
    "subgroup",
]
