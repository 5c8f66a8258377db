"""Query towers over histories with their first weights, exported without a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayrec import Batch, KeyedJaggedTensor
from rayrec.inference import Inputs, Trained, export
from rayrec.inference.checkpoint_model import CheckpointModel
from rayrec.inference.graph import QueryOutput
from rayrec.models import RETRIEVERS, Retriever
from rayrec.modules import EmbeddingBagConfig

TABLE = "item_vectors.embeddings.embeddings.item.weight"


@dataclass(frozen=True)
class Weights:
    """The weights of a model in memory, read as those of a checkpoint."""

    state: dict[str, torch.Tensor]
    path: str = "memory"

    def dense(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.state.items() if name != TABLE}

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {TABLE.removesuffix(".weight"): tuple(self.state[TABLE].shape)}

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self.state[f"{key}.weight"][start:stop]


@dataclass(frozen=True)
class Tower:
    """A model of histories in the feature and column `history`.

    Args:
        model: The model itself, with its table.
    """

    model: Retriever
    trained: Trained

    def export(self, folder: Path) -> Path:
        return export(self.trained, folder).folder

    def vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors of the items in these rows of the table, by blocks of the table."""
        blocks = [*CheckpointModel(self.trained).item_vectors(rows)]
        vectors = torch.empty(len(rows), blocks[0][1].shape[1])
        for indices, block in blocks:
            vectors[indices] = block
        return vectors

    @torch.no_grad()
    def queries(self, histories: list[list[int]]) -> torch.Tensor:
        """Queries of histories of table rows, of the model itself."""
        return self.model.query(batch_of(histories))


def batch_of(histories: list[list[int]]) -> Batch:
    ids = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
    sparse = KeyedJaggedTensor(["history"], ids, lengths=torch.tensor([len(history) for history in histories]))
    return Batch(torch.empty(len(histories), 0), sparse, torch.ones(len(histories)))


def tower_of(
    family: str, settings: dict[str, Any], rows: int, dim: int, mapping: dict[str, Any] | None = None, seed: int = 0
) -> Tower:
    """
    Args:
        rows: Rows of the item table.
        mapping: Of ids; default: they are rows.
    """
    tables = [EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name="item", feature_names=["history"])]

    def make(device: str) -> Retriever:
        return RETRIEVERS[family](tables, 0, tables_device=device, history="history", **settings)  # type: ignore[no-any-return]

    torch.manual_seed(seed)
    model = make("cpu").eval()
    random = torch.Generator().manual_seed(0)

    def batches(_: int | None) -> Iterator[Batch]:
        sizes = torch.randint(0, 12, (40,), generator=random).tolist()
        yield batch_of([torch.randint(0, rows, (size,), generator=random).tolist() for size in sizes])

    sparse = [{"name": "history", "kind": "id_list", "mapping": mapping or {"kind": "identity"}}]
    trained = Trained(
        make_model=lambda: make("meta"),
        weights=Weights(model.state_dict()),  # type: ignore[arg-type]
        inputs=Inputs(keys=("history",), num_dense=0, labels=None, weighted=False, query=QueryOutput(seen="history")),
        mapping={"schema": {"sparse": sparse}, "tables": [{"name": "item", "rows": rows, "features": ["history"]}]},
        rows_of={"history": rows},
        batches=batches,
    )
    return Tower(model, trained)
