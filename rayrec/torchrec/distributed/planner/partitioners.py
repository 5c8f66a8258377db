"""Partitioners: assign ranks to the shards of a proposal."""

from __future__ import annotations

import copy
from dataclasses import replace
from enum import Enum

from rayrec.distributed.plan.shards import ShardingType
from rayrec.torchrec.distributed.planner.bases import Partitioner
from rayrec.torchrec.distributed.planner.parts import (
    DeviceHardware,
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    Proposal,
    Shard,
    ShardingOption,
    Storage,
    bytes_of,
    cost_of,
)
from rayrec.torchrec.distributed.planner.perf_models import NoopPerfModel
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["GreedyPerfPartitioner", "MemoryBalancedPartitioner", "Partitioner", "SortBy"]

PRECISION_BYTES = 10 << 20  # the bisection of the memory limit stops at this distance
Devices = list[DeviceHardware]


class SortBy(Enum):
    """The order in which tables are placed."""

    STORAGE = "storage"
    PERF = "perf"


class GreedyPerfPartitioner(Partitioner):
    """Places tables that use all ranks first, then the other tables, largest first, on the least loaded rank or host
    with enough free memory.

    Args:
        sort_by: measure of size.
        balance_modules: place collections with few tables first.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by, self._balance_modules = sort_by, balance_modules

    def partition(
        self, proposal: Proposal, storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> Proposal:
        """Return the proposal with ranks.

        Args:
            hbm_per_device: bytes of device memory per rank, instead of the topology's.

        Raises:
            PlannerError: the proposal does not fit.
        """
        devices = copy.deepcopy(storage_constraint.devices)
        for device in devices if hbm_per_device else ():
            device.storage = replace(device.storage, hbm=hbm_per_device or 0)
        local = storage_constraint.local_world_size
        hosts = [devices[start : start + local] for start in range(0, len(devices), local)]
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                _one_per_device(option, devices)
        for group in self._groups(proposal):
            match PartitionByType(group[0].partition_by):
                case PartitionByType.DEVICE:
                    _least_busy(group[0], devices, local)
                case PartitionByType.HOST:
                    _on_a_host(group, hosts)
                case PartitionByType.MULTI_HOST:
                    _on_hosts(group[0], hosts)
        return proposal

    def _groups(self, proposal: Proposal) -> list[Proposal]:
        """Group options that are placed together, largest first."""
        groups: dict[str, Proposal] = {}
        for option in proposal:
            if option.partition_by != PartitionByType.UNIFORM.value:
                groups.setdefault(option.dependency or option.fqn, []).append(option)
        paths = [option.path for option in proposal]

        def key(group: Proposal) -> tuple[object, ...]:
            module_rank = -paths.count(group[0].path) if self._balance_modules else 0
            if self._sort_by is SortBy.PERF:
                return module_rank, sum(option.total_perf for option in group)
            return module_rank, sum((option.total_storage for option in group), Storage(0, 0, 0))

        return sorted(groups.values(), key=key, reverse=True)


class MemoryBalancedPartitioner(Partitioner):
    """Minimizes the device memory per rank by bisection, as long as the plan of `GreedyPerfPartitioner` stays as fast.

    Args:
        max_search_count: number of bisection steps.
        tolerance: fraction by which a plan may be slower.
        balance_modules: see `GreedyPerfPartitioner`.
    """

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        self._tries, self._tolerance = max_search_count, tolerance
        self._greedy = GreedyPerfPartitioner(SortBy.PERF, balance_modules)

    def partition(self, proposal: Proposal, storage_constraint: Topology) -> Proposal:
        rating = NoopPerfModel(storage_constraint)
        slowest = rating.rate(self._greedy.partition(proposal, storage_constraint)) * (1 + self._tolerance)
        best = _ranks(proposal)
        rank_bytes = [0] * storage_constraint.world_size
        shards = [shard for option in proposal for shard in option.shards]
        for shard in shards:
            assert shard.rank is not None
            rank_bytes[shard.rank] += bytes_of(shard).hbm
        upper = max(rank_bytes)
        lower = max(sum(rank_bytes) // len(rank_bytes), max(bytes_of(shard).hbm for shard in shards))
        for _ in range(self._tries):
            if lower + PRECISION_BYTES >= upper:
                break
            limit = (upper + lower) // 2
            try:
                fits = rating.rate(self._greedy.partition(proposal, storage_constraint, limit)) <= slowest
            except PlannerError:
                fits = False
            if fits:
                best, upper = _ranks(proposal), limit
            else:
                lower = limit
        for shard, rank in zip(shards, best, strict=True):
            shard.rank = rank
        return proposal


def _ranks(proposal: Proposal) -> list[int | None]:
    return [rank for option in proposal for rank in option.get_shards_assignment()]


def _place(shard: Shard, device: DeviceHardware) -> None:
    shard.rank = device.rank
    device.storage -= bytes_of(shard)
    device.perf += cost_of(shard)


def _one_per_device(option: ShardingOption, devices: Devices) -> None:
    """Place one shard on each device, in order."""
    if option.num_shards != len(devices):
        raise _error(f"{option.fqn} has {option.num_shards} shards for {len(devices)} ranks; one per rank is needed")
    for shard, device in zip(option.shards, devices, strict=True):
        if not bytes_of(shard).fits_in(device.storage):
            raise _error(f"{option.fqn}: {bytes_of(shard)} exceeds {device.storage} on rank {device.rank}")
        _place(shard, device)


def _least_busy(option: ShardingOption, devices: Devices, local: int) -> None:
    """Place each shard on the least loaded device with enough memory; ties go to the lowest local rank."""
    for shard in option.shards:
        fitting = [device for device in devices if bytes_of(shard).fits_in(device.storage)]
        if not fitting:
            raise _error(f"{option.fqn}: no rank has {bytes_of(shard)} free")
        _place(shard, min(fitting, key=lambda device: (device.perf.total, device.rank % local, device.rank)))


def _on_a_host(group: Proposal, hosts: list[Devices]) -> None:
    """Place all options of a group on the least loaded host with enough memory."""
    for host in sorted(hosts, key=_load):
        trial = copy.deepcopy(host)
        try:
            for option in group:
                if option.sharding_type == ShardingType.TABLE_ROW_WISE.value:
                    _one_per_device(option, trial)
                else:
                    _least_busy(option, trial, len(trial))
        except PlannerError:
            continue
        _commit(host, trial)
        return
    raise _error(f"{group[0].fqn}: no host has enough free memory")


def _on_hosts(option: ShardingOption, hosts: list[Devices]) -> None:
    """Place shards on as many hosts as they need, least loaded first."""
    local = len(hosts[0])
    count, rest = divmod(option.num_shards, local)
    if rest:
        raise _error(f"{option.fqn}: {option.num_shards} shards must be a multiple of the {local} ranks of a host")
    by_load = sorted(hosts, key=_load)
    starts = range(len(by_load) - count + 1) if count < len(by_load) else [0]
    for start in starts:
        candidates = [by_load[(start + offset) % len(by_load)] for offset in range(count)]
        trial = copy.deepcopy(candidates)  # a repeated host stays one object
        try:
            _one_per_device(option, [device for host in trial for device in host])
        except PlannerError:
            continue
        for host, tried in zip(candidates, trial, strict=True):
            _commit(host, tried)
        return
    raise _error(f"{option.fqn}: no {count} hosts have enough free memory")


def _load(host: Devices) -> float:
    return sum(device.perf.total for device in host)


def _commit(host: Devices, trial: Devices) -> None:
    """Copy the state of a successful trial to the host."""
    for device, tried in zip(host, trial, strict=True):
        device.storage, device.perf = tried.storage, tried.perf


def _error(text: str) -> PlannerError:
    return PlannerError(text, PlannerErrorType.PARTITION)
