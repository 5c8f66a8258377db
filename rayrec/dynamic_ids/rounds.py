"""The rule of `loops.step` as operations on tensors, for CUDA: equal bit for bit, without a wait for the device.

Every array has a static size: where the loop leaves lookups out, masks do. A masked write goes to the last row of the
bucket, a fallback row, whose state never changes. Suffixes: N lookups in the order of their hash, P the same with those
first that ask for a row, in the order in which they do; S own rows of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec._runtime.numba_loops import loops
from rayrec.dynamic_ids.config import Evict
from rayrec.dynamic_ids.id_map import COUNTED, LOOPS, IdMap, chances
from rayrec.dynamic_ids.layout import EMPTY, EMPTY_IN_FIRST, HASHED

WINDOWS = 1 << 16  # lookups whose buckets are read at a time, which bounds memory
_LOW, _COUNT, _LOWEST = 2**32 - 1, 2**31 - 1, -(2**63)
_FREE, _USED = _LOWEST, 2**63 - 1
_FACTORS = tuple(factor - 2**64 for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChanges:
    """As `Changes`, of a static size: entries without a change have row -1."""

    row: Tensor
    old: Tensor
    new: Tensor
    kind: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMapped:
    """As `Mapped`; the statistics are a tensor in the order of `COUNTED`."""

    rows: Tensor
    changes: DeviceChanges
    statistics: Tensor


class DeviceIdMap:
    """`IdMap` on a device. torch has few operators for uint32, so int32 tensors hold the bits of `last_seen`, `score`
    and `sighted`."""

    def __init__(self, host: IdMap, device: torch.device | str) -> None:
        """Copies the state of `host` to the device."""
        self.config, self.layout, self.clock, self.buckets = host.config, host.layout, host.clock, host.buckets
        state = host.state()
        self.identity = torch.from_numpy(state["identity"].copy()).to(device)
        self.cells = torch.from_numpy(state["cells"].copy()).to(device)
        self.last_seen, self.score, self.sighted = (
            torch.from_numpy(state[name].view("int32").copy()).to(device) for name in ("last_seen", "score", "sighted")
        )
        self.chance = torch.from_numpy(chances(host.config).view("int64")).to(device)

    def to_host(self) -> IdMap:
        """Copies the state to a map on the host; waits for the device."""
        host = IdMap(self.config)
        host.buckets, host.clock = self.buckets, self.clock
        for name, own in host.state().items():
            setattr(host, name, getattr(self, name).cpu().numpy().view(own.dtype).copy())
        return host

    def find(self, ids: Tensor, unseen: int = HASHED) -> Tensor:
        """As `IdMap.find`."""
        hashed = _mix(ids)
        bucket = self._bucket(hashed)
        rows, found = self._search(ids, bucket)
        found &= ~self._expired(rows)
        return torch.where(found, rows, self._fallback(hashed, bucket) if unseen == HASHED else unseen)

    def step(self, ids: Tensor, clock: int, counts: Tensor | None = None) -> DeviceMapped:
        """As `IdMap.step`. The clock comes from the host, where ranks agreed on it a batch ahead."""
        self.clock = max(self.clock, clock)
        if not ids.numel():
            none = ids.new_zeros(0)
            changes = DeviceChanges(row=none, old=none, new=none, kind=none)
            return DeviceMapped(rows=none, changes=changes, statistics=ids.new_zeros(len(COUNTED)))
        hashed = _mix(ids)
        order = torch.argsort(hashed ^ _LOWEST, stable=True)  # as unsigned numbers
        hashed, id_N = hashed[order], ids[order]
        count_N = torch.ones_like(ids) if counts is None else counts[order].long() & _LOW
        first, group = _groups(hashed)
        total = _sums(count_N, group).clamp(max=_COUNT)
        bucket = self._bucket(hashed)
        _, bucket_group = _groups(bucket)
        spare = (bucket + 1) * self.layout.bucket_rows - 1
        empty = torch.where(bucket + self.buckets.start == 0, EMPTY_IN_FIRST, EMPTY)

        # 1. Rows that have their id and have not expired.
        row, found = self._search(id_N, bucket)
        expired = found & self._expired(row)
        own = found & ~expired
        seen = self.last_seen[row].long() & _LOW
        score = self._decayed(self.score[row].long(), seen) + total
        score = torch.where(own, score.clamp(max=_COUNT) | 1 << 31, 0)
        self._write(torch.where(own, row, spare), None, score, own * self.clock)

        # 2. An expired row whose id comes is freed.
        self._write(torch.where(expired, row, spare), empty, torch.zeros_like(score), torch.zeros_like(score))

        # 3. Admission.
        missing = ~own
        enters, want = self._admitted(hashed, total, bucket, bucket_group, missing, first)
        asks = first & missing & enters

        # 4. The n-th id that asks in a bucket gets the n-th row of the bucket, in the order of ranks, if it may.
        start = torch.maximum(want, total)
        key = torch.where(asks, bucket, len(self.buckets)) << 32 | (_COUNT - start)
        key, by_key = torch.sort(key, stable=True)
        bucket, spare, empty, start, id_P = (each[by_key] for each in (bucket, spare, empty, start, id_N))
        number = torch.arange(key.numel(), device=key.device) - torch.searchsorted(key >> 32, key >> 32)
        rank, slot = self._row_by_rank(bucket, number)
        taken = asks[by_key] & (number < self.layout.own_rows) & (rank != _USED)
        taken &= self._rank(start, torch.full_like(start, self.clock)) > rank
        row_P = bucket * self.layout.bucket_rows + slot
        if self.config.evict is Evict.LFU_AGED:
            stays = asks[by_key] & (number < self.layout.own_rows) & (rank != _USED) & ~taken
            count = self.score[row_P].long()
            count = torch.where(stays, count - torch.minimum(count - 1, start), 0)
            self.score[torch.where(stays, row_P, spare)] = count.to(torch.int32)
        old, left = self.identity[row_P], taken & (self.score[row_P] != 0)
        by_age = left & (rank == _FREE)
        self._write(
            torch.where(taken, row_P, spare), torch.where(taken, id_P, empty), taken * start, taken * self.clock
        )

        row_of_group = torch.full_like(row, -1)
        row_of_group.scatter_reduce_(0, group[by_key], torch.where(taken, row_P, -1), "amax")
        row_N = torch.where(own, row, self._fallback(hashed, self._bucket(hashed)))
        row_N = torch.where(row_of_group[group] >= 0, row_of_group[group], row_N)
        self.score[row_N] = self.score[row_N] & _COUNT
        module = loops(LOOPS)
        gone = expired & first
        changes = DeviceChanges(
            row=torch.cat([torch.where(gone, row, -1), torch.where(taken, row_P, -1)]),
            old=torch.cat([id_N * gone, old * left]),
            new=torch.cat([torch.zeros_like(row), id_P * taken]),
            kind=torch.cat(
                [gone * (module.LEFT | module.EXPIRED),
                 taken * module.TAKEN + left * module.LEFT + by_age * module.EXPIRED]
            ),
        )  # fmt: skip
        got_row = own | (row_of_group[group] >= 0)
        statistics = torch.stack(
            [count_N.sum(), (count_N * got_row).sum(), taken.sum(), (left & ~by_age).sum(), gone.sum() + by_age.sum(),
             (first & missing & ~enters).sum(), asks.sum() - taken.sum()]
        )  # fmt: skip
        return DeviceMapped(
            rows=torch.empty_like(row_N).index_copy_(0, order, row_N), changes=changes, statistics=statistics
        )

    def _bucket(self, hashed: Tensor) -> Tensor:
        return (_upper(hashed) * self.layout.buckets >> 32) - self.buckets.start

    def _fallback(self, hashed: Tensor, bucket: Tensor) -> Tensor:
        layout = self.layout
        shared = (hashed & _LOW) * (layout.bucket_rows - layout.own_rows) >> 32
        return bucket * layout.bucket_rows + layout.own_rows + shared

    def _windows(self, bucket: Tensor) -> Tensor:
        """The own rows `[N, S]` of buckets."""
        slots = torch.arange(self.layout.own_rows, device=bucket.device)
        return bucket[:, None] * self.layout.bucket_rows + slots

    def _search(self, ids: Tensor, bucket: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each id and whether it has one; else the first row of its bucket."""
        rows, found = [], []
        for id_W, bucket_W in zip(ids.split(WINDOWS), bucket.split(WINDOWS), strict=True):
            equal = self.identity[self._windows(bucket_W)] == id_W[:, None]
            rows.append(bucket_W * self.layout.bucket_rows + equal.long().argmax(1))
            found.append(equal.any(1))
        return torch.cat(rows), torch.cat(found)

    def _expired(self, rows: Tensor) -> Tensor:
        if self.config.ttl_s is None:
            return torch.zeros_like(rows, dtype=torch.bool)
        return self.clock - (self.last_seen[rows].long() & _LOW) > self.config.ttl_s

    def _decayed(self, score: Tensor, seen: Tensor) -> Tensor:
        half_life = self.config.half_life_s
        return score if half_life is None else score >> (self.clock // half_life - seen // half_life).clamp(max=31)

    def _rank(self, score: Tensor, seen: Tensor) -> Tensor:
        return (seen - 2**31) << 32 | score if self.config.evict is Evict.LRU else score << 32 | seen

    def _row_by_rank(self, bucket: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """The rank and slot of the row with this number in its bucket, by rank, then by slot."""
        ranks, slots = [], []
        number = number.clamp(max=self.layout.own_rows - 1)
        for bucket_W, number_W in zip(bucket.split(WINDOWS), number.split(WINDOWS), strict=True):
            rows = self._windows(bucket_W)
            bits, seen = self.score[rows], self.last_seen[rows].long() & _LOW
            rank_WS = self._rank(self._decayed(bits.long() & _COUNT, seen), seen)
            rank_WS = torch.where(bits < 0, _USED, rank_WS)
            rank_WS = torch.where((bits == 0) | self._expired(rows), _FREE, rank_WS)
            rank_WS, slot_WS = torch.sort(rank_WS, dim=1, stable=True)
            ranks.append(rank_WS.gather(1, number_W[:, None])[:, 0])
            slots.append(slot_WS.gather(1, number_W[:, None])[:, 0])
        return torch.cat(ranks), torch.cat(slots)

    def _admitted(
        self, hashed: Tensor, total: Tensor, bucket: Tensor, bucket_group: Tensor, missing: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Whether each id is admitted, and its count by the filter, which is updated."""
        sighted = self.sighted[bucket].long() & _LOW
        distinct = _sums((first & missing).long(), bucket_group)
        cells = self.cells.shape[1]
        enters, want = torch.ones_like(missing), total
        if cells:
            due = (sighted >= self.layout.bucket_rows * self.config.min_count // 4) & (distinct > 0)
            sighted = torch.where(due, 0, sighted)
            done = bucket.new_full((), -1)  # the last bucket of the windows before: its cells age once
            for bucket_W, due_W in zip(bucket.split(WINDOWS), due.split(WINDOWS), strict=True):
                ages = due_W & (bucket_W != done)
                self.cells[bucket_W] = self.cells[bucket_W] >> ages[:, None].to(torch.uint8)
                done = bucket_W[-1]
            numbers = torch.arange(0, 64, 16, device=hashed.device)
            cell = ((_mix(hashed ^ _FACTORS[0])[:, None] >> numbers) & 65535) * cells >> 16
            cell += bucket[:, None] * cells
            flat = self.cells.view(-1)
            want = (flat[cell].long().amin(1) + total).clamp(max=255)
            enters = want >= self.config.min_count
            update = (want * missing).to(torch.uint8)[:, None].expand_as(cell)
            flat.scatter_reduce_(0, cell.view(-1), update.reshape(-1), "amax")
        elif self.chance.numel():
            seed = (self.config.seed + 2**63) % 2**64 - 2**63
            draw = _upper(_mix(hashed ^ _mix(_mix(sighted + 1) ^ seed)))
            enters = draw < self.chance[total.clamp(max=255)]
        self.sighted[bucket] = (sighted + distinct).to(torch.int32)
        return enters, want

    def _write(self, rows: Tensor, identity: Tensor | None, score: Tensor, last_seen: Tensor) -> None:
        if identity is not None:
            self.identity[rows] = identity
        self.score[rows], self.last_seen[rows] = score.to(torch.int32), last_seen.to(torch.int32)


def _upper(number: Tensor) -> Tensor:
    return number >> 32 & _LOW


def _mix(number: Tensor) -> Tensor:
    """As `layout.mix`, in int64."""
    for factor in _FACTORS:
        number = (number ^ (number >> 33 & 2**31 - 1)) * factor
    return number ^ (number >> 33 & 2**31 - 1)


def _groups(sorted_N: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each entry is the first of equal ones, and the number of its group."""
    first = torch.ones_like(sorted_N, dtype=torch.bool)
    first[1:] = sorted_N[1:] != sorted_N[:-1]
    return first, first.cumsum(0) - 1


def _sums(number_N: Tensor, group_N: Tensor) -> Tensor:
    """The sum over each entry's group."""
    return torch.zeros_like(number_N).scatter_add_(0, group_N, number_N)[group_N]
