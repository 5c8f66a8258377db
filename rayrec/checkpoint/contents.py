"""What a checkpoint holds: tables, their optimizer state, the dense part and its optimizer, all by unsharded names.

Nothing here knows files. `to_save` gives DCP's state dict; `Loading` gives one to fill and puts the numbers in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rayrec.checkpoint import row_state
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.sharding.parameters import ShardedTable

TABLE, TABLE_STATE, DENSE, DENSE_STATE = "table", "table_state", "dense", "dense_state"


def to_save(model: DistributedModelParallel, dense_optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """This rank's part of the state, by key."""
    for kernel in model.kernels():
        kernel.weights()  # rows in a device cache are written back to where the shards point
    state: dict[str, Any] = {}
    for name, table in model.tables().items():
        state[f"{TABLE}/{name}"] = _whole_rows(table, {n: item.weight for n, item in enumerate(table.local)})
        for key in state_keys(model)[name]:
            rowwise = any(item.state[key].dim() == 1 for item in table.local)
            state[f"{TABLE_STATE}/{name}/{key}"] = (
                row_state.to_save(table, key)
                if rowwise
                else _whole_rows(table, {n: item.state[key] for n, item in enumerate(table.local)})
            )
    for name, tensor in dense_tensors(model).items():
        state[f"{DENSE}/{name}"] = tensor.detach()
    for name, values in _dense_state(model, dense_optimizer).items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                state[f"{DENSE_STATE}/{name}/{key}"] = value
    return state


def state_keys(model: DistributedModelParallel) -> dict[str, list[str]]:
    """For each table, the optimizer states that this rank holds of it."""
    return {name: sorted({key for item in table.local for key in item.state}) for name, table in model.tables().items()}


def dense_tensors(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are not tables, by name."""
    tables = tuple(f"{name}." for name in model.tables())
    inner = model.module.state_dict()
    return {name: tensor for name, tensor in inner.items() if not name.startswith(tables)}


def _whole_rows(table: ShardedTable, tensors: Mapping[int, torch.Tensor]) -> Rectangles:
    pieces = [
        Rectangle(item.shard.rows.start, item.shard.cols.start, tensors[number])
        for number, item in enumerate(table.local)
    ]
    return Rectangles((table.config.num_embeddings, table.config.embedding_dim), pieces)


def _dense_state(model: DistributedModelParallel, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    if optimizer is None:
        return {}
    return {name: dict(optimizer.state.get(param, {})) for name, param in model.dense_parameters().items()}


class Loading:
    """A state dict to be filled from a checkpoint, and what to do once it is.

    Args:
        model, dense_optimizer: to be loaded into.
        metadata: of the checkpoint's tensors, by key.

    Raises:
        ValueError: the checkpoint lacks a table, a state or a parameter of the model, or has another size for it.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        metadata: Mapping[str, Any],
    ) -> None:
        self.state: dict[str, Any] = {}
        self._metadata = metadata
        self._finish: list[Callable[[], None]] = []
        for name, table in model.tables().items():
            self._table(name, table)
        for name, tensor in dense_tensors(model).items():
            self._require(f"{DENSE}/{name}", tensor.shape)
            self.state[f"{DENSE}/{name}"] = tensor.detach()
        if dense_optimizer is not None:
            self._dense_states(model, dense_optimizer)

    def finish(self) -> None:
        """To be called when `state` is filled."""
        for step in self._finish:
            step()

    def _table(self, name: str, table: ShardedTable) -> None:
        shape = (table.config.num_embeddings, table.config.embedding_dim)
        self._require(f"{TABLE}/{name}", shape)
        self.state[f"{TABLE}/{name}"] = _whole_rows(table, {n: item.weight for n, item in enumerate(table.local)})
        for key in sorted({key for item in table.local for key in item.state}):
            place = f"{TABLE_STATE}/{name}/{key}"
            saved = self._require(place, None)
            if table.local[0].state[key].dim() == 1:
                self.state[place], loads = row_state.to_load(table, key, saved[1])
                self._finish += [load.finish for load in loads]
            else:
                self._require(place, shape)
                self.state[place] = _whole_rows(table, {n: item.state[key] for n, item in enumerate(table.local)})

    def _require(self, key: str, shape: tuple[int, ...] | torch.Size | None) -> torch.Size:
        kind, _, name = key.partition("/")
        what = {TABLE: "table", TABLE_STATE: "optimizer state of table", DENSE: "parameter"}[kind]
        saved = self._metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(
                f"the checkpoint has no {what} {name!r}: it was made by another model or optimizer; "
                "use the configuration it was made with, or start a new run under another name"
            )
        if shape is not None and tuple(saved.size) != tuple(shape):
            raise ValueError(
                f"{what} {name!r} has shape {tuple(shape)}, but {tuple(saved.size)} in the checkpoint; "
                "use the configuration it was made with, or start a new run under another name"
            )
        return saved.size

    def _dense_states(self, model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> None:
        """State is made on an optimizer's first step, so a fresh one takes keys and sizes from the checkpoint."""
        for name, param in model.dense_parameters().items():
            prefix = f"{DENSE_STATE}/{name}/"
            for key, saved in self._metadata.items():
                if not key.startswith(prefix):
                    continue
                device = param.device if tuple(saved.size) == tuple(param.shape) else torch.device("cpu")
                value = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
                self.state[key] = value
                optimizer.state[param][key.removeprefix(prefix)] = value
