"""The state of a model in a checkpoint, by unsharded names: tables, the dense part, and the optimizer state of both.

`to_save` returns the state to write; `Loading` provides a state to fill, then loads it. This module does no I/O.

A table is updated inside backward, or by an optimizer over its shards. In both cases the optimizer state is sharded
like the weights, and saved in a form that can be resharded: rectangles, column units, or single numbers. Row-wise
optimizers keep one accumulator per row for every column shard. It is saved as `[rows, units]`, where the width of a
unit is the greatest common divisor of the column edges. A shard of another plan reads the units that it covers: their
width-weighted mean is the exact full-row value when shards are merged, and a copy when they are split.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rayrec.checkpoint.format import SavedTensor
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.kernel.interface import Kernel, updating
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.plan.shards import Shard, Span

TABLE, TABLE_STATE, DENSE, DENSE_STATE = "table", "table_state", "dense", "dense_state"
RNG = "rng"
MAP = "map"  # of a table with dynamic ids: which id has which row
_STATE_BYTES = 8192  # more than 625 numbers of 32 bits in digits


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
        state[f"{TABLE}/{name}"] = _as_rectangles(table, [item.weight for item in table.local])
        for key, value in _table_state_to_save(name, table, [item.state for item in table.local]).items():
            state[f"{TABLE_STATE}/{name}/{key}"] = value
        if table.dense and dense_optimizer is not None:
            states = [_state_of(dense_optimizer, item.parameter) for item in table.local]
            for key, value in _table_state_to_save(name, table, states).items():
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
    return as_tensors(optimizer.state.get(param, {}))


class Loading:
    """A state to fill from a checkpoint, and the steps to complete the load.

    Args:
        model, dense_optimizer: receive the state.
        saved: the tensors of the checkpoint, by key.

    Raises:
        ValueError: a table, optimizer state or parameter of the model is missing in the checkpoint or has another size,
            or a table was trained inside backward and has a dense optimizer in the model.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saved: Mapping[str, SavedTensor],
    ) -> None:
        self.state: dict[str, Rectangles] = {}
        self._saved = saved
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
        self.state[f"{TABLE}/{name}"] = _as_rectangles(table, [item.weight for item in table.local])
        for key in sorted({key for item in table.local for key in item.state}):
            path, targets = f"{TABLE_STATE}/{name}/{key}", [item.state[key] for item in table.local]
            size = self._require(path, shape if targets[0].dim() == 2 else None)
            self._request(path, table, size, targets)

    def _dense_table_state(self, name: str, table: ShardedTable, optimizer: torch.optim.Optimizer) -> None:
        """Request the state of a dense optimizer, with keys and sizes of the checkpoint: a new optimizer has no state
        before its first step."""
        if any(key.startswith(f"{TABLE_STATE}/{name}/") for key in self._saved):
            raise ValueError(
                f"table {name!r} was trained inside backward in the checkpoint, but its kernel is dense here; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        for key, saved in self._saved_states(name) if table.local else ():
            targets = _empty_states(table, key, saved, optimizer)
            self._request(f"{DENSE_STATE}/{name}/{key}", table, torch.Size(saved.size), targets)
            for item, target in zip(table.local, targets, strict=True):
                optimizer.state[item.parameter][key] = target

    def _request(self, path: str, table: ShardedTable, size: torch.Size, targets: Sequence[torch.Tensor]) -> None:
        self.state[path], steps = _table_state_to_load(table, size, targets)
        self._finish += steps

    def _saved_states(self, name: str) -> list[tuple[str, SavedTensor]]:
        """(key, tensor) of the saved state of a dense optimizer for a parameter or table."""
        prefix = f"{DENSE_STATE}/{name}/"
        return [(key.removeprefix(prefix), saved) for key, saved in self._saved.items() if key.startswith(prefix)]

    def _require(self, key: str, shape: tuple[int, ...] | torch.Size | None) -> torch.Size:
        kind, _, name = key.partition("/")
        noun = {TABLE: "table", TABLE_STATE: "optimizer state of table", DENSE: "parameter"}[kind]
        saved = self._saved.get(key)
        if saved is None:
            raise ValueError(
                f"the checkpoint has no {noun} {name!r}: it belongs to another model or optimizer; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        if shape is not None and tuple(saved.size) != tuple(shape):
            raise ValueError(
                f"{noun} {name!r} has shape {tuple(shape)}, but {tuple(saved.size)} in the checkpoint; "
                "use the configuration that it was made with, or start a new run under another name"
            )
        return torch.Size(saved.size)

    def _dense_states(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for name, param in params.items():
            for key, saved in self._saved_states(name):
                device = state_device(key, param, optimizer)
                value = torch.empty(saved.size, dtype=saved.dtype, device=device)
                self.state[f"{DENSE_STATE}/{name}/{key}"] = Rectangles.whole(value)
                optimizer.state[param][key] = value


def _as_rectangles(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """Tensors of the shapes of this rank's shards, as rectangles of the table."""
    rectangles = [
        Rectangle((item.shard.rows.start, item.shard.cols.start), tensor)
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((table.config.num_embeddings, table.config.embedding_dim), rectangles)


def as_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, with its numbers converted to tensors."""
    numbers = {
        key: torch.tensor(float(v), dtype=torch.float64) for key, v in state.items() if isinstance(v, int | float)
    }
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)} | numbers


def _table_state_to_save(
    name: str, table: ShardedTable, states: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, Rectangles]:
    """The states of this rank's shards, by key.

    Raises:
        ValueError: a state is neither of the shape of its shard, nor one number per row, nor a single number.
    """
    out: dict[str, Rectangles] = {}
    for key in sorted({key for state in states for key in state}):
        tensors = [state[key] for state in states]
        shape, (rows, dim) = tensors[0].shape, table.local[0].shard.shape
        if shape == (rows, dim):
            out[key] = _as_rectangles(table, tensors)
        elif shape == (rows,):
            out[key] = _rows_to_save(table, tensors)
        elif shape == ():
            out[key] = Rectangles.whole(tensors[0])
        else:
            raise ValueError(
                f"table {name!r}: the optimizer keeps a state {key!r} of shape {tuple(shape)} for a shard of "
                f"{rows} x {dim}, which cannot be resharded; use an optimizer whose state has one number per weight, "
                "per row or per table"
            )
    return out


def state_device(key: str, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of a torch optimizer's state of `param`: the device of `param`, but the step count is on the host
    unless the optimizer is fused or capturable."""
    (group,) = (group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    on_host = key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.device("cpu") if on_host else param.device


def _empty_states(
    table: ShardedTable, key: str, saved: SavedTensor, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """An empty state for each of this rank's shards, with the dtype and dimensions that were saved under `key`."""
    table_size = torch.Size((table.config.num_embeddings, table.config.embedding_dim))
    dims = 2 if saved.size == table_size else min(len(saved.size), 1)
    return [
        torch.empty(
            item.shard.shape[:dims],
            dtype=saved.dtype,
            device=state_device(key, item.parameter, optimizer),
        )
        for item in table.local
    ]


def _table_state_to_load(
    table: ShardedTable, size: torch.Size, targets: Sequence[torch.Tensor]
) -> tuple[Rectangles, list[Callable[[], object]]]:
    """(rectangles to read for the states of this rank's shards, functions that then fill these states)

    Args:
        size: shape of the saved state.
        targets: states of this rank's shards.
    """
    if len(size) == 0:
        number = torch.empty((), dtype=targets[0].dtype, device=targets[0].device)
        return Rectangles.whole(number), [partial(target.copy_, number) for target in targets]
    if size == (table.config.num_embeddings, table.config.embedding_dim):
        return _as_rectangles(table, targets), []
    return _rows_to_load(table, targets, size[1])


def _unit_width(dim: int, shards: Iterable[Shard]) -> int:
    """Width of a column unit, from the edges of all ranks' shards; the full width if columns are not sharded."""
    return math.gcd(dim, *(edge for shard in shards for edge in (shard.cols.start, shard.cols.stop)))


def _rows_to_save(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """Row-wise states `[rows]` of this rank's shards, repeated for each unit that a shard covers."""
    config = table.config
    unit = _unit_width(config.embedding_dim, table.shards)
    rectangles = [
        Rectangle(
            (item.shard.rows.start, item.shard.cols.start // unit),
            tensor[:, None].expand(-1, item.shard.cols.size // unit),
        )
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((config.num_embeddings, config.embedding_dim // unit), rectangles)


def _merge(target: torch.Tensor, units: torch.Tensor, widths: torch.Tensor) -> None:
    """Average the units `[rows, units]` that a shard covers into its state `[rows]`. A state that was saved from this
    shard comes back as it was."""
    first = units[:, 0]
    target.copy_(torch.where((units == units[:, :1]).all(1), first, (units * widths).sum(1) / widths.sum()))


def _rows_to_load(
    table: ShardedTable, targets: Sequence[torch.Tensor], num_units: int
) -> tuple[Rectangles, list[Callable[[], object]]]:
    """Like `_table_state_to_load`, for row-wise states `[rows]` that were saved with `num_units` units."""
    config = table.config
    unit = config.embedding_dim // num_units
    loads, rectangles = list[Callable[[], object]](), []
    for item, target in zip(table.local, targets, strict=True):
        start, stop = item.shard.cols.start // unit, -(-item.shard.cols.stop // unit)
        read = target.new_empty(target.shape[0], stop - start)
        widths = _covered(item.shard.cols, unit, range(start, stop))
        loads.append(partial(_merge, target, read, torch.tensor(widths, dtype=target.dtype, device=target.device)))
        rectangles.append(Rectangle((item.shard.rows.start, start), read))
    return Rectangles((config.num_embeddings, num_units), rectangles), loads


def _covered(cols: Span, unit: int, units: Sequence[int]) -> list[int]:
    return [cols.overlap(Span(number * unit, (number + 1) * unit)).size for number in units]


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


def empty_random_states(rank: int, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
    """Empty tensors for the random states of a rank in a checkpoint.

    Args:
        saved: the tensors of the checkpoint, by key.
    """
    prefix = f"{RNG}/{rank:05d}/"
    return {key: torch.empty(item.size, dtype=torch.uint8) for key, item in saved.items() if key.startswith(prefix)}


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
    """A random state as JSON. Padded: if the shape depended on the digits, ranks would plan every save anew."""
    return torch.frombuffer(bytearray(json.dumps(value).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def _value(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.numpy()))
