"""A ranker of 26 ids and 13 numbers that the benchmarks of exports and services use, with its first weights."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrec.inference import Trained
from rayrec.inference.graph import Inputs
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

DENSE = 13
KEYS = [f"f{i}" for i in range(26)]


class Weights:
    """A model's weights with the interface of a checkpoint's weights."""

    path = Path("memory")

    def __init__(self, model: torch.nn.Module) -> None:
        self._state = model.state_dict()

    def _tables(self) -> dict[str, torch.Tensor]:
        ends, inside = ".weight", ".embedding_bags."
        return {name.removesuffix(ends): tensor for name, tensor in self._state.items() if inside in name}

    def tables(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tables().items()}

    def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
        return self._tables()[table][start:stop]

    def dense(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._state.items() if ".embedding_bags." not in name}


def batch_of(keys: list[str], rows: int, size: int, ids: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    count = len(keys) * size
    sparse = KeyedJaggedTensor(
        keys,
        torch.randint(rows, (count * ids,), generator=generator),
        lengths=torch.full((count,), ids, dtype=torch.int64),
        stride=size,
    )
    label = torch.randint(2, (size,), generator=generator).float()
    return Batch(torch.randn(size, DENSE, generator=generator), sparse, label)


def trained_ranker(rows: int, batches: int = 2, size: int = 500) -> tuple[Trained, DLRM]:
    """The ranker as it is exported, and the model itself.

    Args:
        rows: Of each table.
        batches, size: Evaluation rows.
    """
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=64, feature_names=[key])
        for i, key in enumerate(KEYS)
    ]

    def make(device: str = "meta") -> DLRM:
        over = [512, 512, 256, 1]
        return DLRM(tables, DENSE, dense_arch=[512, 256, 64], over_arch=over, tables_device=device, seed=1)

    torch.manual_seed(0)
    source = make("cpu").eval()
    schema = {"dense": [{"name": f"d{i}"} for i in range(DENSE)], "sparse": [{"name": key} for key in KEYS]}
    trained = Trained(
        make_model=make,
        weights=Weights(source),  # type: ignore[arg-type]
        inputs=Inputs(tuple(KEYS), DENSE, None, False),
        mapping={"schema": schema, "tables": [{"rows": rows, "features": [key]} for key in KEYS]},
        rows_of=dict.fromkeys(KEYS, rows),
        batches=lambda count=None: [batch_of(KEYS, rows, size, 1, seed) for seed in range(batches)],
    )
    return trained, source
