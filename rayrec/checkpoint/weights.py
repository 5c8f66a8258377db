"""The weights of a checkpoint, rows at a time and without the sharded model that they were saved from."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrec.checkpoint.contents import DENSE, TABLE
from rayrec.checkpoint.errors import CheckpointError
from rayrec.checkpoint.manifest import read_checkpoint
from rayrec.checkpoint.reader import Reader
from rayrec.storage.folder import open_folder


class CheckpointWeights:
    """Tables and dense tensors of a committed checkpoint, by their unsharded names.

    Args:
        path: the checkpoint's folder, a path or URI.

    Raises:
        CheckpointError: it is no checkpoint, or damaged; also where rows are read.
    """

    def __init__(self, path: str | Path) -> None:
        folder = open_folder(path)
        checkpoint = read_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{path} is no complete checkpoint: it has no manifest.json")
        self.path, self.manifest = path, checkpoint.manifest
        self._reader = Reader(folder, checkpoint.manifest)

    def tables(self) -> dict[str, torch.Size]:
        """Shape of each table, by the path of its module, as `embedding_bags.embedding_bags.user`."""
        return {name: torch.Size(self._reader.index.tensors[f"{TABLE}/{name}"].size) for name in self._names(TABLE)}

    def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, dim]` of a table, in the number format it was saved in."""
        with self._reader:
            return self._reader.tensor(f"{TABLE}/{table}", slice(start, stop))

    def dense(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer that is no table."""
        with self._reader:
            return {name: self._reader.tensor(f"{DENSE}/{name}") for name in self._names(DENSE)}

    def _names(self, kind: str) -> list[str]:
        return [key.removeprefix(f"{kind}/") for key in self._reader.index.tensors if key.startswith(f"{kind}/")]
