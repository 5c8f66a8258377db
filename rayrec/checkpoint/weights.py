"""The weights of a checkpoint, rows at a time and without the sharded model that they were saved from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rayrec.checkpoint.contents import DENSE, TABLE
from rayrec.checkpoint.rectangles import LoadPlanner, Rectangle, Rectangles


class CheckpointWeights:
    """Tables and dense tensors of a committed checkpoint, by their unsharded names.

    Args:
        path: the checkpoint's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = FileSystemReader(self.path)
        self._saved = {
            key: saved
            for key, saved in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def tables(self) -> dict[str, torch.Size]:
        """Shape of each table, by the path of its module, as `embedding_bags.embedding_bags.user`."""
        return {name: self._saved[f"{TABLE}/{name}"].size for name in self._names(TABLE)}

    def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, dim]` of a table, in the number format it was saved in."""
        saved = self._saved[f"{TABLE}/{table}"]
        rows = torch.empty(stop - start, saved.size[1], dtype=saved.properties.dtype)
        self._load({f"{TABLE}/{table}": Rectangles(saved.size, [Rectangle(start, 0, rows)])})
        return rows

    def dense(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer that is no table."""
        names = self._names(DENSE)
        saved = {name: self._saved[f"{DENSE}/{name}"] for name in names}
        found = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in saved.items()}
        if found:
            self._load({f"{DENSE}/{name}": tensor for name, tensor in found.items()})
        return found

    def _names(self, kind: str) -> list[str]:
        return [key.removeprefix(f"{kind}/") for key in self._saved if key.startswith(f"{kind}/")]

    def _load(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            dcp.load(state, storage_reader=self._reader, planner=LoadPlanner(), no_dist=True)
