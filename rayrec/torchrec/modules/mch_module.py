"""Managed collisions by a policy: the ids with the highest scores get separate rows.

During training, the module counts the ids of each batch. Every `eviction_interval` steps, the policy decides which ids
get a separate row until the next decision; all other ids share the last row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from rayrec.torchrec.modules.mc_module import Features, ManagedCollisionModule
from rayrec.torchrec.modules.mc_policies import COUNTS, LAST_SEEN, MCHEvictionPolicy
from rayrec.torchrec.sparse import JaggedTensor

HashFn = Callable[[torch.Tensor, int], torch.Tensor]
NO_ID = torch.iinfo(torch.int64).max
HISTORY_MARGIN = 1.25  # capacity of the history relative to the size of the first batch


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Assigns rows to the ids with the highest scores; other ids share the last row ("zero-collision hashing").

    Args:
        zch_size: number of rows, including the last one.
        device: device of the state.
        eviction_policy: decides which ids keep a row.
        eviction_interval: training steps between two decisions.
        input_hash_size: end of the id range.
        input_hash_func: maps ids and `input_hash_size` to other ids, for example by a hash.
        mch_size, mch_hash_func: ignored, as in TorchRec.
        name: used in error messages and in the seed of a random policy.
        output_global_offset: the first row.
        output_segments: rows at which it may be cut; default: its first row and its end.
        buckets: number of equal segments into which it can be cut.

    Raises:
        ValueError: a size or interval below 1.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = NO_ID,
        input_hash_func: HashFn | None = None,
        mch_size: int | None = None,
        mch_hash_func: HashFn | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        for setting, value in (("zch_size", zch_size), ("eviction_interval", eviction_interval)):
            if value < 1:
                raise ValueError(f"{setting}={value} must be at least 1")
        start = output_global_offset
        super().__init__(device, output_segments or [start, start + zch_size])
        self._zch_size, self._start, self._buckets = zch_size, start, buckets
        self._policy, self._interval, self._name = eviction_policy, eviction_interval, name
        self._hash_size, self._hash = input_hash_size, input_hash_func
        rows = torch.arange(start, start + zch_size, device=device)
        self.register_buffer("_mch_sorted_raw_ids", torch.full_like(rows, NO_ID))
        self.register_buffer("_mch_remapped_ids_mapping", rows)
        self._metadata = [info.metadata_name for info in eviction_policy.metadata_info if info.is_mch_metadata]
        for metadata_name in self._metadata:
            self.register_buffer(f"_mch_{metadata_name}", torch.zeros_like(rows))
        self._segments = self._buffers["_output_segments_tensor"]
        self._iteration: int | None = None  # host copy of `_current_iter_tensor`, once it was read
        self._decided = 0  # iteration of the last decision
        self._capacity = 0  # most ids in the history
        self._history: list[tuple[int, torch.Tensor]] = []  # (iteration, ids)
        self._evicted: torch.Tensor | None = None

    def preprocess(self, features: Features) -> Features:
        if self._hash is None:
            return features
        return {name: _with_values(ids, self._hash(ids.values(), self._hash_size)) for name, ids in features.items()}

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Counts the ids of a step in training, and assigns rows every `eviction_interval` steps."""
        if not self.training:
            return features
        if self._iteration is None:
            self._iteration = self._decided = int(self._buffer("_current_iter_tensor"))
        self._iteration += 1
        self._buffer("_current_iter_tensor").add_(1)
        batch_ids = [ids.values() for ids in features.values()]
        if self.gather is not None:
            batch_ids = [self.gather(ids) for ids in batch_ids]
        if not self._capacity:  # the first batch with ids
            self._capacity = int(sum(len(ids) for ids in batch_ids) * self._interval * HISTORY_MARGIN)
        for ids in batch_ids:
            recorded = ids[: self._capacity - sum(len(past_ids) for _, past_ids in self._history)]
            self._history.append((self._iteration, recorded.to(self._device, torch.int64)))
        if self._iteration - self._decided == self._interval:
            self._decide(self._iteration)
            self._decided = self._iteration
            self._history = []
        return features

    def _decide(self, iteration: int) -> None:
        """Assigns rows to ids of the history that score higher than ids with a row."""
        ids, new_metadata = self._history_ids()
        table, size = self._buffer("_mch_sorted_raw_ids"), self._zch_size
        metadata = {name: self._buffer(f"_mch_{name}") for name in self._metadata}
        has_row, slots = self._slots(ids)
        if COUNTS in metadata:
            metadata[COUNTS][slots] += new_metadata[COUNTS][has_row]
            metadata[COUNTS][size - 1] = NO_ID  # keeps the last row for the shared ids
        if LAST_SEEN in metadata:
            metadata[LAST_SEEN][slots] = new_metadata[LAST_SEEN][has_row]
            metadata[LAST_SEEN][size - 1] = iteration
        ids, new_metadata = ids[~has_row], {name: values[~has_row] for name, values in new_metadata.items()}
        combined = {name: torch.cat([values, new_metadata[name]]) for name, values in metadata.items()}
        ranked = torch.argsort(self._policy.scores(iteration, combined), descending=True, stable=True)
        high, low = ranked[:size], ranked[size:]
        winners, losers = high[high >= size] - size, low[low < size]
        table[losers] = ids[winners]
        for name, values in metadata.items():
            values[losers] = new_metadata[name][winners]
        rows = self._buffer("_mch_remapped_ids_mapping")[losers]
        self._evicted = rows if self._evicted is None else torch.unique(torch.cat([self._evicted, rows]))
        self._sort()

    def _history_ids(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the unique ids of the history that pass the filter, by descending count, with their metadata."""
        ids, inverse, counts = torch.unique(
            torch.cat([ids for _, ids in self._history]), return_inverse=True, return_counts=True
        )
        steps = torch.cat([torch.full_like(ids, step) for step, ids in self._history])
        last = torch.zeros_like(ids).scatter_reduce_(0, inverse, steps, reduce="amax", include_self=False)
        if counts.numel() and self._policy.threshold_filtering_func is not None:
            mask = self._passing(counts)
            ids, counts, last = ids[mask], counts[mask], last[mask]
        order = torch.argsort(counts, descending=True, stable=True)
        return ids[order], {COUNTS: counts[order], LAST_SEEN: last[order]}

    def _passing(self, counts: torch.Tensor) -> torch.Tensor:
        """Applies the filter of the policy; returns a mask or indices.

        It runs with seeded generators, so all ranks draw the same numbers and assign the same rows. The states of the
        generators are restored.
        """
        assert self._policy.threshold_filtering_func is not None
        seed = zlib.crc32(f"{self._name}:{self._iteration}".encode())
        on_gpu = counts.is_cuda
        with torch.random.fork_rng(devices=[counts.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(counts.device):
                    torch.cuda.manual_seed(seed)
            return self._policy.threshold_filtering_func(counts)[0]

    def _slots(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a mask of the ids with a row, and their indices in the sorted table."""
        table = self._buffer("_mch_sorted_raw_ids")
        slots = torch.searchsorted(table[:-1], ids)
        has_row = table[slots] == ids
        return has_row, slots[has_row]

    def _sort(self) -> None:
        order = torch.argsort(self._buffer("_mch_sorted_raw_ids"), stable=True)
        for name in ("sorted_raw_ids", "remapped_ids_mapping", *self._metadata):
            buffer = self._buffer(f"_mch_{name}")
            buffer.copy_(buffer[order])

    def _buffer(self, name: str) -> torch.Tensor:
        buffer = self._buffers[name]
        assert buffer is not None
        return buffer

    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: torch.Tensor | None = None
    ) -> Features:
        out = {}
        for name, ids in features.items():
            has_row, slots = self._slots(ids.values())
            rows = torch.full_like(ids.values(), self._start + self._zch_size - 1)
            rows[has_row] = self._buffer("_mch_remapped_ids_mapping")[slots].to(rows.dtype)
            out[name] = _with_values(ids, rows)
        return out

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        return self.remap(self.profile(self.preprocess(features)))

    def output_size(self) -> int:
        return self._zch_size

    def input_size(self) -> int:
        return self._hash_size

    def buckets(self) -> int:
        return self._buckets

    def open_slots(self) -> torch.Tensor:
        table = self._buffer("_mch_sorted_raw_ids")
        return self._zch_size - 1 - torch.searchsorted(table, table.new_tensor([NO_ID]))

    def evict(self) -> torch.Tensor | None:
        evicted, self._evicted = self._evicted, None
        return evicted

    def reset_inference_mode(self) -> None:
        """Clears the list of reassigned rows."""
        self._evicted = None

    @torch.no_grad()
    def validate_state(self) -> None:
        """Sorts a loaded state.

        Raises:
            ValueError: the segments of the state do not include the first row and the end of this module.
        """
        segments = self._buffer("_output_segments_tensor")
        for edge in (self._start, self._start + self._zch_size):
            if edge not in segments:
                raise ValueError(
                    f"managed collisions {self._name or ''}: rows [{self._start}, {self._start + self._zch_size}) do "
                    f"not match the segments {segments[segments >= 0].tolist()} of the state"
                )
        self._iteration = None
        self._sort()

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> MCHManagedCollisionModule:
        return type(self)(
            output_id_range[1] - output_id_range[0],
            device or self.device,
            self._policy,
            self._interval,
            self._hash_size,
            self._hash,
            name=self._name,
            output_global_offset=output_id_range[0],
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
        )


def _with_values(ids: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values, ids.weights_or_none(), ids.lengths_or_none(), ids.offsets_or_none())
