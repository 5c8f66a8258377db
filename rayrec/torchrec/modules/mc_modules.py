"""Managed collisions: the most used ids of a large range get the rows of a smaller table.

In training a module counts the ids of each batch. Every `eviction_interval` steps a policy decides which ids have their
own row until the next decision; all other ids share the last row. Under DistributedModelParallel every rank counts the
ids of all ranks, so that all ranks make the same decisions.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.comm import all_gather_uneven
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.torchrec.modules.mc_policies import (
    COUNTS,
    LAST_SEEN,
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]

Features = dict[str, JaggedTensor]
HashFn = Callable[[torch.Tensor, int], torch.Tensor]
NO_ID = torch.iinfo(torch.int64).max
SEGMENTS = 1025  # numbers that the state keeps of them, whatever they are
HISTORY_MARGIN = 1.25  # room for larger batches than the first


class ManagedCollisionModule(nn.Module, ABC):
    """Gives ids rows `[0, output_size())`.

    Args:
        device: of its state.
        output_segments: ascending rows at which parts of it may begin and end; at most 1025.
        skip_state_validation: keeps none of this in its state.
        read_only_suffix, enable_per_feature_lookups: stored, not used.

    Raises:
        ValueError: too many segments.
    """

    gather: Callable[[torch.Tensor], torch.Tensor] | None = None  # the ids `[N]` of all ranks, in their order

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._read_only_suffix = read_only_suffix
        self._enable_per_feature_lookups = enable_per_feature_lookups
        if skip_state_validation:
            return
        if len(output_segments) > SEGMENTS:
            raise ValueError(f"{len(output_segments)} output segments are more than {SEGMENTS}")
        segments = [*output_segments, *[-1] * (SEGMENTS - len(output_segments))]
        self.register_buffer("_output_segments_tensor", torch.tensor(segments, device=device))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(lambda module, keys: module.validate_state())

    def on_sharded(self, process_group: dist.ProcessGroup | None) -> None:
        """Called by DistributedModelParallel: from now on a step counts the ids of all ranks."""
        self.gather = partial(all_gather_uneven, group=process_group)

    @property
    def readable_suffix(self) -> str:
        return self._read_only_suffix

    @property
    def device(self) -> torch.device:
        return self._device

    @abstractmethod
    def preprocess(self, features: Features) -> Features:
        """The first transformation of ids, for example a hash."""

    @abstractmethod
    def evict(self) -> torch.Tensor | None:
        """Rows that got another id since the last call; None without a decision."""

    @abstractmethod
    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: torch.Tensor | None = None
    ) -> Features:
        """The rows of ids."""

    @abstractmethod
    def profile(self, features: Features) -> Features:
        """Counts a step's ids; returns them."""

    @abstractmethod
    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Preprocess, profile and remap."""

    @abstractmethod
    def output_size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """End of the range of ids."""

    @abstractmethod
    def buckets(self) -> int:
        """Number of equal parts that it can be cut into."""

    @abstractmethod
    def validate_state(self) -> None:
        """Called after a state is loaded."""

    @abstractmethod
    def open_slots(self) -> torch.Tensor:
        """Number of rows without an id."""

    @abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """A module for a part of the rows."""


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
            kept[COUNTS][size - 1] = NO_ID  # the last row stays that of all others
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
        """The history's different ids that pass the filter, frequent ones first, with their counts and last steps."""
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
        """The policy's filter of counts: a mask or places. What it draws from torch's generators is the same on all
        ranks, since they must give an id the same row; the generators' states are restored."""
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


class ManagedCollisionCollection(nn.Module):
    """A module for each table of a collection; ids in, rows out.

    Args:
        managed_collision_modules: by the tables' names.
        embedding_configs: the tables, each as large as its module's output.
        need_preprocess: stored, not used.

    Raises:
        ValueError: a table without a module, or of another size; a feature that several tables read.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        for config in embedding_configs:
            if config.name not in managed_collision_modules:
                raise ValueError(f"table {config.name!r} has no managed collision module")
            size = managed_collision_modules[config.name].output_size()
            if size != config.num_embeddings:
                raise ValueError(
                    f"table {config.name!r}: num_embeddings={config.num_embeddings}, but its managed collision module "
                    f"gives {size} rows"
                )
        names = [name for config in embedding_configs for name in config.feature_names]
        shared = next((name for name in names if names.count(name) > 1), None)
        if shared is not None:
            raise ValueError(
                f"feature {shared!r} is read by several tables, whose managed collisions give it different rows; "
                "copy the feature under another name for each table"
            )
        self._names = names
        self._managed_collision_modules = nn.ModuleDict(dict(managed_collision_modules))
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        return {table: module.buckets() for table, module in self._modules_by_table().items()}

    def _modules_by_table(self) -> dict[str, Any]:
        return dict(self._managed_collision_modules.items())

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Rows in place of ids, keys in the order of the tables and their features.

        Args:
            features: ids of every feature of the tables; others are left out.
        """
        if features.keys() != self._names:
            features = features.permute([features.keys().index(name) for name in self._names])
        modules = self._modules_by_table()
        parts = features.split([len(config.feature_names) for config in self._embedding_configs])
        rows = []
        for config, part in zip(self._embedding_configs, parts, strict=True):
            ids = JaggedTensor(part.values(), lengths=part.lengths())
            rows.append(modules[config.name]({config.name: ids}, mutate_miss_lengths)[config.name].values())
        return KeyedJaggedTensor(
            keys=self._names,
            values=torch.cat(rows),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def evict(self) -> dict[str, torch.Tensor | None]:
        """For each table the rows that got another id since the last call."""
        return {table: module.evict() for table, module in self._modules_by_table().items()}

    def open_slots(self) -> dict[str, torch.Tensor]:
        """For each table the rows that no id has."""
        return {table: module.open_slots() for table, module in self._modules_by_table().items()}


def apply_mc_method_to_jt_dict(mc_module: nn.Module, method: str, features_dict: Features) -> Features:
    """Calls a module's method with the features."""
    return getattr(mc_module, method)(features_dict)


def _with_values(each: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values, each.weights_or_none(), each.lengths_or_none(), each.offsets_or_none())
