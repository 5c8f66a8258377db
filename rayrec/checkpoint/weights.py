"""Reads the weights of a checkpoint, full or an increment, by their unsharded names."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrec.checkpoint.contents import DENSE, MAP, TABLE
from rayrec.checkpoint.errors import CheckpointError
from rayrec.checkpoint.increments import open_reader
from rayrec.checkpoint.manifest import read_checkpoint
from rayrec.storage.folder import open_folder


class CheckpointWeights:
    """Tables and dense tensors of a committed checkpoint, by their unsharded names.

    Args:
        path: the checkpoint's folder, a path or URI.

    Raises:
        CheckpointError: it is not a checkpoint, or it is damaged; also raised when rows are read.
    """

    def __init__(self, path: str | Path) -> None:
        folder = open_folder(path)
        checkpoint = read_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no manifest.json")
        self.path, self.manifest = path, checkpoint.manifest
        self._reader = open_reader(folder, checkpoint.manifest)

    def tables(self) -> dict[str, torch.Size]:
        """Shape of each table, by the path of its module (`embedding_bags.embedding_bags.user`)."""
        return {name: torch.Size(self._reader.index.tensors[f"{TABLE}/{name}"].size) for name in self._names(TABLE)}

    def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, dim]` of a table, in its saved number format."""
        with self._reader:
            return self._reader.tensor(f"{TABLE}/{table}", slice(start, stop))

    def dense(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer that is not a table."""
        with self._reader:
            return {name: self._reader.tensor(f"{DENSE}/{name}") for name in self._names(DENSE)}

    def map_array(self, name: str) -> torch.Tensor:
        """An array of the map of a table with dynamic ids, e.g. `user/identity`."""
        with self._reader:
            return self._reader.tensor(f"{MAP}/{name}")

    def _names(self, kind: str) -> list[str]:
        return [key.removeprefix(f"{kind}/") for key in self._reader.index.tensors if key.startswith(f"{kind}/")]
