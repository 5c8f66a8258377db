"""A new model from another one's checkpoint: tables and layers by name, what optimizers kept left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayrec.checkpoint.contents import DENSE, TABLE, dense_tensors
from rayrec.checkpoint.errors import CheckpointError
from rayrec.checkpoint.manifest import Checkpoint
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.store import CheckpointStore
from rayrec.distributed import DistributedModelParallel, comm
from rayrec.distributed.collections.sharded_table import ShardedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which names of the new model mean which of the checkpoint.

    Args:
        renames: name in the checkpoint → name here; of a table, a layer, or a module with all that is in it.
        fresh: names here that are not taken, each with all that is in it.
    """

    renames: Mapping[str, str]
    fresh: tuple[str, ...] = ()

    def source(self, name: str) -> str | None:
        """What `name` is called in the checkpoint; None where it is not to be taken."""
        if any(_inside(name, fresh) is not None for fresh in self.fresh):
            return None
        for old, new in self.renames.items():
            if (rest := _inside(name, new)) is not None:
                prefix = name[: len(name) - len(rest) - len(new)]
                return f"{prefix}{old}{rest}"
        return name


@dataclass(frozen=True, slots=True)
class Taken:
    """What came from the checkpoint, and what begins anew."""

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
) -> Taken:
    """Fill the tables and layers of `model` that the checkpoint has; every rank calls it.

    Args:
        rows: by table (the last part of its name), how many of its first rows mean the same here as there; all where
            it is not given.

    Raises:
        CheckpointError: nothing fits, or something of one name has another size; names it.
        DamagedCheckpointError, OSError: as `CheckpointStore.load`.
    """

    def read() -> Taken:
        with store.reader(checkpoint) as reader:
            state, taken = _wanted(reader, checkpoint.path, model, names, rows)
            reader.fill(state)
            return taken

    return on_every_rank(read, group)


def _wanted(
    reader: Reader, path: str, model: DistributedModelParallel, names: Names, rows: Mapping[str, int]
) -> tuple[dict[str, Rectangles], Taken]:
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
                f"{path}: layer {name!r} has shape {tuple(tensor.shape)}, but {size} there; give it that shape, "
                "or list it in init_from.fresh"
            )
        layers.append(name)
        _refuse_twice(path, source, state)
        state[source] = Rectangles.whole(tensor.detach())
    if not state:
        raise CheckpointError(
            f"{path}: none of its tables and layers has a name of this model ({_some(model.tables())}); it has "
            f"{_some(key.partition('/')[2] for key in reader.index.tensors if key.startswith(f'{TABLE}/'))}; say what "
            "is called otherwise in init_from.renames"
        )
    return state, Taken(tuple(tables), tuple(layers), tuple(fresh))


def _rows_of(reader: Reader, path: str, source: str, name: str, table: ShardedTable, same: int | None) -> Rectangles:
    """The rows of this rank's shards that are taken."""
    there, here = reader.index.tensors[source].size, (table.config.num_embeddings, table.config.embedding_dim)
    if there[1] != here[1] or (same is None and there[0] != here[0]):
        raise CheckpointError(
            f"{path}: table {name!r} is {here} (rows, dim), but {there} there; give it that size, or list it in "
            "init_from.fresh"
        )
    stop = there[0] if same is None else min(there[0], here[0], same)
    parts = [
        Rectangle((item.shard.rows.start, item.shard.cols.start), item.weight[: max(0, stop - item.shard.rows.start)])
        for item in table.local
    ]
    return Rectangles(there, [part for part in parts if part.tensor.numel()])


def _refuse_twice(path: str, source: str, state: Mapping[str, Rectangles]) -> None:
    if source in state:
        raise CheckpointError(f"{path}: {source.partition('/')[2]!r} is to be taken twice; see init_from.renames")


def _saved(reader: Reader, kind: str, name: str | None) -> str | None:
    key = f"{kind}/{name}"
    return key if name is not None and key in reader.index.tensors else None


def _inside(name: str, outer: str) -> str | None:
    """What is left of `name` behind `outer`, a run of whole parts of it; None where it is not in it."""
    at = f".{name}.".find(f".{outer}.")
    return None if at < 0 else name[at + len(outer) :]


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
