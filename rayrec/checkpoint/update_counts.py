"""How often each table was updated, on which an optimizer's bias correction depends."""

from __future__ import annotations

from rayrec.checkpoint.manifest import Manifest
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.kernel import UpdatingKernel
from rayrec.distributed.kernel.choice import updating


def _trained_tables(model: DistributedModelParallel) -> list[tuple[UpdatingKernel, list[str]]]:
    """This rank's kernels that update inside backward, each with the names of its tables in the model."""
    names = {id(table): name for name, table in model.tables().items()}
    return [
        (kernel, [names[id(collection.tables()[table.config.name])] for table in kernel.tables])
        for collection in model.sharded_modules().values()
        for kernel in updating(collection.kernels())
    ]


def update_counts(model: DistributedModelParallel) -> dict[str, int]:
    """The updates of each table of which this rank has a part."""
    counts: dict[str, int] = {}
    for kernel, tables in _trained_tables(model):
        counts |= {name: max(kernel.iteration, counts.get(name, 0)) for name in tables}
    return counts


def set_update_counts(model: DistributedModelParallel, manifest: Manifest) -> None:
    """A kernel takes the largest count of its tables."""
    for kernel, tables in _trained_tables(model):
        kernel.iteration = max(manifest.updates.get(name, manifest.iteration) for name in tables)
