"""Initializes a new model from the checkpoint of another model: tables and layers by name, no optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayrec.checkpoint.contents import DENSE, TABLE, dense_tensors
from rayrec.checkpoint.errors import CheckpointError
from rayrec.checkpoint.increments import AnyReader
from rayrec.checkpoint.manifest import Checkpoint
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.store import CheckpointStore
from rayrec.distributed import DistributedModelParallel, comm
from rayrec.distributed.collections.sharded_table import ShardedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Maps names of the new model to names in the checkpoint.

    Args:
        renames: name in the checkpoint → name in the model, of tables, layers, or modules with all their contents.
        fresh: names in the model that are not loaded; the name of a module includes its contents.
    """

    renames: Mapping[str, str]
    fresh: tuple[str, ...] = ()

    def source(self, name: str) -> str | None:
        """The name in the checkpoint; None if `name` is not loaded."""
        if any(_inside(name, fresh) is not None for fresh in self.fresh):
            return None
        for old, new in self.renames.items():
            if (rest := _inside(name, new)) is not None:
                prefix = name[: len(name) - len(rest) - len(new)]
                return f"{prefix}{old}{rest}"
        return name


@dataclass(frozen=True, slots=True)
class LoadedNames:
    """Names of the loaded tables and layers, and in `fresh` of the tables and layers that were not loaded."""

    tables: tuple[str, ...]
    layers: tuple[str, ...]
    fresh: tuple[str, ...]


def load_weights(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    model: DistributedModelParallel,
    names: Names,
    rows: Mapping[str, int],
    group: comm.Group = None,
) -> LoadedNames:
    """Load the tables and layers of `model` that the checkpoint has. A collective.

    Args:
        rows: by table (last component of its name), the number of leading rows with the same ids in model and
            checkpoint; default: all.

    Raises:
        CheckpointError: no name matches, or a table or layer has another size; names it.
        DamagedCheckpointError, OSError: see `CheckpointStore.load`.
    """

    def read() -> LoadedNames:
        with store.reader(checkpoint) as reader:
            state, loaded = _plan(reader, checkpoint.path, model, names, rows)
            reader.fill(state)
            return loaded

    return on_every_rank(read, group)


def _plan(
    reader: AnyReader, path: str, model: DistributedModelParallel, names: Names, rows: Mapping[str, int]
) -> tuple[dict[str, Rectangles], LoadedNames]:
    state: dict[str, Rectangles] = {}
    tables, layers, fresh = [], [], []
    for name, table in model.tables().items():
        source = _saved(reader, TABLE, names.source(name))
        if source is None:
            fresh.append(name)
        else:
            tables.append(name)
            _refuse_twice(path, source, state)
            state[source] = _rows_of(reader, path, source, name, table, rows.get(name.rpartition(".")[2]))
    for name, tensor in dense_tensors(model).items():
        source = _saved(reader, DENSE, names.source(name))
        if source is None:
            fresh.append(name)
            continue
        size = reader.index.tensors[source].size
        if tuple(tensor.shape) != size:
            raise CheckpointError(
                f"{path}: layer {name!r} has shape {tuple(tensor.shape)}, but {size} in the checkpoint; change its "
                "shape, or list it in init_from.fresh"
            )
        layers.append(name)
        _refuse_twice(path, source, state)
        state[source] = Rectangles.whole(tensor.detach())
    if not state:
        raise CheckpointError(
            f"{path}: none of its tables and layers has a name of this model ({_first_names(model.tables())}); it has "
            f"{_first_names(key.partition('/')[2] for key in reader.index.tensors if key.startswith(f'{TABLE}/'))}; "
            "map the names in init_from.renames"
        )
    return state, LoadedNames(tuple(tables), tuple(layers), tuple(fresh))


def _rows_of(reader: AnyReader, path: str, source: str, name: str, table: ShardedTable, same: int | None) -> Rectangles:
    """The rows to load into this rank's shards."""
    saved_size, size = reader.index.tensors[source].size, (table.config.num_embeddings, table.config.embedding_dim)
    if saved_size[1] != size[1] or (same is None and saved_size[0] != size[0]):
        raise CheckpointError(
            f"{path}: table {name!r} is {size} (rows, dim), but {saved_size} in the checkpoint; change its size, or "
            "list it in init_from.fresh"
        )
    stop = saved_size[0] if same is None else min(saved_size[0], size[0], same)
    rectangles = [
        Rectangle((item.shard.rows.start, item.shard.cols.start), item.weight[: max(0, stop - item.shard.rows.start)])
        for item in table.local
    ]
    return Rectangles(saved_size, [rectangle for rectangle in rectangles if rectangle.tensor.numel()])


def _refuse_twice(path: str, source: str, state: Mapping[str, Rectangles]) -> None:
    if source in state:
        raise CheckpointError(f"{path}: {source.partition('/')[2]!r} would be loaded twice; see init_from.renames")


def _saved(reader: AnyReader, kind: str, name: str | None) -> str | None:
    key = f"{kind}/{name}"
    return key if name is not None and key in reader.index.tensors else None


def _inside(name: str, outer: str) -> str | None:
    """The rest of `name` after the components `outer`; None if `name` does not contain them."""
    start = f".{name}.".find(f".{outer}.")
    return None if start < 0 else name[start + len(outer) :]


def _first_names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
