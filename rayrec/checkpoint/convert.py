"""A checkpoint as other programs read it: one safetensors file, the `state_dict` of the unsharded model."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrec.checkpoint.container import header, host_bytes
from rayrec.checkpoint.contents import DENSE, DENSE_STATE, TABLE, TABLE_STATE
from rayrec.checkpoint.index import SavedTensor
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import PIECE_BYTES


def unsharded_names(reader: Reader, optimizer: bool = False) -> dict[str, str]:
    """Key in the checkpoint by the name that the unsharded model's `state_dict` has.

    Args:
        optimizer: also what optimizers kept, as `optimizer.NAME.STATE`.
    """
    names = {}
    for key in reader.index.tensors:
        kind, _, name = key.partition("/")
        if kind == TABLE:
            names[f"{name}.weight"] = key
        elif kind == DENSE:
            names[name] = key
        elif kind in (TABLE_STATE, DENSE_STATE) and optimizer:
            names[f"optimizer.{name.replace('/', '.')}"] = key
    return names


def to_safetensors(reader: Reader, path: Path, optimizer: bool = False) -> int:
    """Write one safetensors file; returns how many tensors it has. Needs memory for one piece.

    Raises:
        DamagedCheckpointError: what is read is not what was written; there is no file then.
        OSError: the file cannot be written.
    """
    names = unsharded_names(reader, optimizer)
    order = sorted(names, key=lambda name: -reader.index.tensors[names[name]].dtype.itemsize)
    saved = {name: reader.index.tensors[names[name]] for name in order}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header((name, tensor.dtype, tensor.size) for name, tensor in saved.items()))
            for name, tensor in saved.items():
                for rows in _runs(tensor):
                    file.write(host_bytes(reader.tensor(names[name], rows)))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(saved)


def _runs(tensor: SavedTensor) -> list[slice]:
    """Rows that fit in a piece, one run after the other."""
    if not tensor.size or not tensor.size[0]:
        return [slice(None)]
    count = tensor.size[0]
    nbytes = tensor.dtype.itemsize * max(1, torch.Size(tensor.size).numel())
    each = max(1, PIECE_BYTES * count // nbytes)
    return [slice(start, min(count, start + each)) for start in range(0, count, each)]
