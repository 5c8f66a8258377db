"""The state of a model in a checkpoint, by unsharded names: tables, the dense part, and the optimizer state of both.

This module does no I/O. `to_save` returns the state to write; `Loading` provides a state to fill, then loads it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rayrec.checkpoint import table_state
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.kernel.interface import Kernel, updating
from rayrec.distributed.model_parallel import DistributedModelParallel

TABLE, TABLE_STATE, DENSE, DENSE_STATE = "table", "table_state", "dense", "dense_state"
RNG = "rng"


def to_save(model: DistributedModelParallel, dense_optimizer: torch.optim.Optimizer | None) -> dict[str, Rectangles]:
    """This rank's share of the state, by key. A collective if sharding groups are replicated.

    Raises:
        ValueError: the optimizer state of a dense table cannot be resharded.
    """
    if isinstance(model, DMPCollection):
        model.sync()  # a checkpoint has one model, the average of all groups
    for kernel in model.kernels():
        kernel.weights()  # writes rows of a device cache back to the shards
    state: dict[str, Rectangles] = {}
    for name, table in model.tables().items():
        state[f"{TABLE}/{name}"] = table_state.whole_rows(table, [item.weight for item in table.local])
        for key, value in table_state.to_save(name, table, [item.state for item in table.local]).items():
            state[f"{TABLE_STATE}/{name}/{key}"] = value
        if table.dense and dense_optimizer is not None:
            states = [_state_of(dense_optimizer, item.parameter) for item in table.local]
            for key, value in table_state.to_save(name, table, states).items():
                state[f"{DENSE_STATE}/{name}/{key}"] = value
    for name, tensor in dense_tensors(model).items():
        state[f"{DENSE}/{name}"] = Rectangles.whole(tensor.detach())
    if dense_optimizer is not None:
        for name, param in model.other_parameters().items():
            for key, number in _state_of(dense_optimizer, param).items():
                state[f"{DENSE_STATE}/{name}/{key}"] = Rectangles.whole(number)
    return state


def dense_tensors(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are not tables, by name."""
    tables = tuple(f"{name}." for name in model.tables())
    inner = model.module.state_dict()
    return {name: tensor for name, tensor in inner.items() if not name.startswith(tables)}


def _state_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, torch.Tensor]:
    return table_state.as_tensors(optimizer.state.get(param, {}))


class Loading:
    """A state to fill from a checkpoint, and the steps to complete the load.

    Args:
        model, dense_optimizer: receive the state.
        metadata: metadata of the checkpoint's tensors, by key.

    Raises:
        ValueError: a table, optimizer state or parameter of the model is missing in the checkpoint or has another size,
            or a table was trained inside backward and has a dense optimizer in the model.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        metadata: Mapping[str, Any],
    ) -> None:
        self.state: dict[str, Rectangles] = {}
        self._metadata = metadata
        self._finish: list[Callable[[], object]] = []
        if dense_optimizer is not None:
            dense_optimizer.state.clear()  # an earlier attempt may have loaded a damaged checkpoint
        for name, table in model.tables().items():
            self._table(name, table)
            if table.dense and dense_optimizer is not None:
                self._dense_table_state(name, table, dense_optimizer)
        for name, tensor in dense_tensors(model).items():
            self._require(f"{DENSE}/{name}", tensor.shape)
            self.state[f"{DENSE}/{name}"] = Rectangles.whole(tensor.detach())
        if dense_optimizer is not None:
            self._dense_states(model.other_parameters(), dense_optimizer)

    def finish(self) -> None:
        """Complete the load. Call after filling `state`."""
        for step in self._finish:
            step()

    def _table(self, name: str, table: ShardedTable) -> None:
        shape = (table.config.num_embeddings, table.config.embedding_dim)
        self._require(f"{TABLE}/{name}", shape)
        self.state[f"{TABLE}/{name}"] = table_state.whole_rows(table, [item.weight for item in table.local])
        for key in sorted({key for item in table.local for key in item.state}):
            path, targets = f"{TABLE_STATE}/{name}/{key}", [item.state[key] for item in table.local]
            size = self._require(path, shape if targets[0].dim() == 2 else None)
            self._request(path, table, size, targets)

    def _dense_table_state(self, name: str, table: ShardedTable, optimizer: torch.optim.Optimizer) -> None:
        """Request the state of a dense optimizer, with keys and sizes of the checkpoint: a new optimizer has no state
        before its first step."""
        if any(key.startswith(f"{TABLE_STATE}/{name}/") for key in self._metadata):
            raise ValueError(
                f"table {name!r} was trained inside backward in the checkpoint, but its kernel is dense here; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        for key, saved in self._saved_states(name) if table.local else ():
            targets = table_state.make_targets(table, key, saved, optimizer)
            self._request(f"{DENSE_STATE}/{name}/{key}", table, saved.size, targets)
            for item, target in zip(table.local, targets, strict=True):
                optimizer.state[item.parameter][key] = target

    def _request(self, path: str, table: ShardedTable, size: torch.Size, targets: Sequence[torch.Tensor]) -> None:
        self.state[path], steps = table_state.to_load(table, size, targets)
        self._finish += steps

    def _saved_states(self, name: str) -> list[tuple[str, Any]]:
        """(key, metadata) of the saved state of a dense optimizer for a parameter or table."""
        prefix = f"{DENSE_STATE}/{name}/"
        return [(key.removeprefix(prefix), saved) for key, saved in self._metadata.items() if key.startswith(prefix)]

    def _require(self, key: str, shape: tuple[int, ...] | torch.Size | None) -> torch.Size:
        kind, _, name = key.partition("/")
        noun = {TABLE: "table", TABLE_STATE: "optimizer state of table", DENSE: "parameter"}[kind]
        saved = self._metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(
                f"the checkpoint has no {noun} {name!r}: it belongs to another model or optimizer; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        if shape is not None and tuple(saved.size) != tuple(shape):
            raise ValueError(
                f"{noun} {name!r} has shape {tuple(shape)}, but {tuple(saved.size)} in the checkpoint; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        return saved.size

    def _dense_states(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for name, param in params.items():
            for key, saved in self._saved_states(name):
                device = table_state.state_device(key, param, optimizer)
                value = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
                self.state[f"{DENSE_STATE}/{name}/{key}"] = Rectangles.whole(value)
                optimizer.state[param][key] = value


def _trained_tables(model: DistributedModelParallel) -> list[tuple[Kernel, list[str]]]:
    """This rank's kernels that update inside backward, each with the names of its tables in the model."""
    names = {id(table): name for name, table in model.tables().items()}
    return [
        (kernel, [names[id(collection.tables()[table.config.name])] for table in kernel.tables])
        for collection in model.sharded_modules().values()
        for kernel in updating(collection.kernels())
    ]


def update_counts(model: DistributedModelParallel) -> dict[str, int]:
    """Number of updates of each table that has a shard on this rank."""
    counts: dict[str, int] = {}
    for kernel, tables in _trained_tables(model):
        counts |= {name: max(kernel.iteration, counts.get(name, 0)) for name in tables}
    return counts


def set_update_counts(model: DistributedModelParallel, manifest: Manifest) -> None:
    """Restore the number of updates. A kernel gets the largest number of its tables."""
    for kernel, tables in _trained_tables(model):
        kernel.iteration = max(manifest.updates.get(name, manifest.iteration) for name in tables)


def random_states(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """States of this rank's random generators (torch, Python, numpy), as bytes by key."""
    states = {"torch": torch.get_rng_state(), "python": _bytes(random.getstate()), "numpy": _bytes(_numpy_state())}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RNG}/{rank:05d}/{name}": state for name, state in states.items()}


def empty_random_states(rank: int, sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Empty tensors for the random states of a rank in a checkpoint.

    Args:
        sizes: metadata of the checkpoint's tensors, by key.
    """
    prefix = f"{RNG}/{rank:05d}/"
    return {key: torch.empty(saved.size, dtype=torch.uint8) for key, saved in sizes.items() if key.startswith(prefix)}


def set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_states` returned."""
    by_name = {key.rpartition("/")[2]: state for key, state in states.items()}
    if "torch" in by_name:
        torch.set_rng_state(by_name["torch"])
    if "cuda" in by_name and device.type == "cuda":
        torch.cuda.set_rng_state(by_name["cuda"], device)
    if "python" in by_name:
        version, numbers, gauss = _value(by_name["python"])
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in by_name:
        name, keys, *rest = _value(by_name["numpy"])
        np.random.set_state((name, np.array(keys, np.uint32), *rest))


def _numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), *rest]


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.numpy()))
