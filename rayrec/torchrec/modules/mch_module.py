"""Managed collisions by a policy: the ids with the highest scores get rows of their own.

In training the module counts the ids of each batch. Every `eviction_interval` steps the policy decides which ids have
their own row until the next decision; all other ids share the last row.
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
HISTORY_MARGIN = 1.25  # room for larger batches than the first


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Rows for the ids with the highest scores of a policy; the last row is for all others ("zero-collision hashing").

    Args:
        zch_size: rows, the last one among them.
        device: of its state.
        eviction_policy: which ids keep a row.
        eviction_interval: training steps between two decisions.
        input_hash_size: where the range of ids ends.
        input_hash_func: of ids and `input_hash_size`: other ids, taken in place of them.
        mch_size, mch_hash_func: accepted for compatibility, ignored (as in TorchRec).
        name: part of the seed of what the policy draws, and of error messages.
        output_global_offset: the first row.
        output_segments: by default where its rows begin and end.
        buckets: equal parts into which it can be cut.

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
        first = output_global_offset
        super().__init__(device, output_segments or [first, first + zch_size])
        self._zch_size, self._first, self._buckets = zch_size, first, buckets
        self._policy, self._interval, self._name = eviction_policy, eviction_interval, name
        self._hash_size, self._hash = input_hash_size, input_hash_func
        rows = torch.arange(first, first + zch_size, device=device)
        self.register_buffer("_mch_sorted_raw_ids", torch.full_like(rows, NO_ID))
        self.register_buffer("_mch_remapped_ids_mapping", rows)
        self._known = [info.metadata_name for info in eviction_policy.metadata_info if info.is_mch_metadata]
        for known in self._known:
            self.register_buffer(f"_mch_{known}", torch.zeros_like(rows))
        self._segments = self._buffers["_output_segments_tensor"]
        self._iteration: int | None = None  # on the host, when the state's is known
        self._decided = 0
        self._room = 0  # ids that the history may hold
        self._history: list[tuple[int, torch.Tensor]] = []  # (iteration, ids)
        self._evicted: torch.Tensor | None = None

    def preprocess(self, features: Features) -> Features:
        if self._hash is None:
            return features
        return {name: _with_values(each, self._hash(each.values(), self._hash_size)) for name, each in features.items()}

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Counts a step's ids in training, and assigns rows every `eviction_interval` steps."""
        if not self.training:
            return features
        if self._iteration is None:
            self._iteration = self._decided = int(self._buffer("_current_iter_tensor"))
        self._iteration += 1
        self._buffer("_current_iter_tensor").add_(1)
        seen = [each.values() for each in features.values()]
        if self.gather is not None:
            seen = [self.gather(ids) for ids in seen]
        if not self._room:  # the first batch that has ids
            self._room = int(sum(len(ids) for ids in seen) * self._interval * HISTORY_MARGIN)
        for ids in seen:
            taken = ids[: self._room - sum(len(kept) for _, kept in self._history)]
            self._history.append((self._iteration, taken.to(self._device, torch.int64)))
        if self._iteration - self._decided == self._interval:
            self._decide(self._iteration)
            self._decided = self._iteration
            self._history = []
        return features

    def _decide(self, iteration: int) -> None:
        """Assigns rows to ids of the history that score higher than ids with a row."""
        ids, new = self._newest()
        table, size = self._buffer("_mch_sorted_raw_ids"), self._zch_size
        kept = {name: self._buffer(f"_mch_{name}") for name in self._known}
        found, places = self._places(ids)
        if COUNTS in kept:
            kept[COUNTS][places] += new[COUNTS][found]
            kept[COUNTS][size - 1] = NO_ID  # the last row stays the shared one
        if LAST_SEEN in kept:
            kept[LAST_SEEN][places] = new[LAST_SEEN][found]
            kept[LAST_SEEN][size - 1] = iteration
        ids, new = ids[~found], {name: values[~found] for name, values in new.items()}
        both = {name: torch.cat([values, new[name]]) for name, values in kept.items()}
        ranked = torch.argsort(self._policy.scores(iteration, both), descending=True, stable=True)
        high, low = ranked[:size], ranked[size:]
        winners, losers = high[high >= size] - size, low[low < size]
        table[losers] = ids[winners]
        for name, values in kept.items():
            values[losers] = new[name][winners]
        rows = self._buffer("_mch_remapped_ids_mapping")[losers]
        self._evicted = rows if self._evicted is None else torch.unique(torch.cat([self._evicted, rows]))
        self._sort()

    def _newest(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The distinct ids of the history that pass the filter, the most frequent first, with counts and last steps."""
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
        """The policy's filter of counts: a mask or places. It runs with seeded generators, so that all ranks draw the
        same numbers and give an id the same row; the generators' states are restored afterwards."""
        assert self._policy.threshold_filtering_func is not None
        seed = zlib.crc32(f"{self._name}:{self._iteration}".encode())
        on_gpu = counts.is_cuda
        with torch.random.fork_rng(devices=[counts.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(counts.device):
                    torch.cuda.manual_seed(seed)
            return self._policy.threshold_filtering_func(counts)[0]

    def _places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A mask of the ids with a row, and their places in the sorted table."""
        table = self._buffer("_mch_sorted_raw_ids")
        places = torch.searchsorted(table[:-1], ids)
        found = table[places] == ids
        return found, places[found]

    def _sort(self) -> None:
        order = torch.argsort(self._buffer("_mch_sorted_raw_ids"), stable=True)
        for name in ("sorted_raw_ids", "remapped_ids_mapping", *self._known):
            buffer = self._buffer(f"_mch_{name}")
            buffer.copy_(buffer[order])

    def _buffer(self, name: str) -> torch.Tensor:
        found = self._buffers[name]
        assert found is not None
        return found

    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: torch.Tensor | None = None
    ) -> Features:
        out = {}
        for name, each in features.items():
            found, places = self._places(each.values())
            rows = torch.full_like(each.values(), self._first + self._zch_size - 1)
            rows[found] = self._buffer("_mch_remapped_ids_mapping")[places].to(rows.dtype)
            out[name] = _with_values(each, rows)
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
        """Clears the record of rows that got another id."""
        self._evicted = None

    @torch.no_grad()
    def validate_state(self) -> None:
        """Sorts a state that was loaded.

        Raises:
            ValueError: it was made of segments that do not begin and end where this one does.
        """
        segments = self._buffer("_output_segments_tensor")
        for edge in (self._first, self._first + self._zch_size):
            if edge not in segments:
                raise ValueError(
                    f"managed collisions {self._name or ''}: rows [{self._first}, {self._first + self._zch_size}) "
                    f"cannot be made of a state cut at {segments[segments >= 0].tolist()}"
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


def _with_values(each: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values, each.weights_or_none(), each.lengths_or_none(), each.offsets_or_none())
