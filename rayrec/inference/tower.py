"""The query tower of a built-in retriever: written beside its index, rebuilt from its settings without training code of
a run, and checked by the vectors that it gave when it was written."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from rayrec.data import Mapping
from rayrec.inference import artifact
from rayrec.inference.artifact import ExportError
from rayrec.inference.export import write_mapping
from rayrec.inference.graph import collections_in, replaced
from rayrec.models import RETRIEVERS, Batch, Retriever
from rayrec.models.retriever import batch_of
from rayrec.modules import EmbeddingBagConfig
from rayrec.quant.embedding import EmbeddingCollection
from rayrec.sparse import KeyedJaggedTensor

TOWER, EXAMPLES, TOLERANCE = "tower.pt", 32, 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a model is made of.

    Args:
        name: of `RETRIEVERS`.
        settings: its `model.args`.
        tables: rows, width and features of each, by name.
        num_dense: N.
        format: number format of the tables.
    """

    name: str
    settings: dict[str, Any]
    tables: dict[str, tuple[int, int, list[str]]]
    num_dense: int = 0
    format: str = "fp32"


@dataclass(frozen=True, slots=True)
class Tower:
    """A model that turns rows into queries.

    Args:
        model: in evaluation mode, on the CPU.
        raw: `schema` and `tables` of the run's config; None: it reads histories of table rows.
        mapping: of what a query needs of a row.
    """

    made: Made
    model: Retriever
    raw: Dict[str, Any] | None = None
    mapping: Mapping | None = None

    @classmethod
    def of(cls, made: Made, state: Dict[str, torch.Tensor] | None = None, raw: Dict[str, Any] | None = None) -> Tower:
        """
        Args:
            state: of the model, its tables in `made.format`; None: its first weights.
        """
        tables = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features))
            for name, (rows, dim, features) in made.tables.items()
        ]
        model = RETRIEVERS[made.name](tables, made.num_dense, tables_device="cpu", **made.settings)
        if made.format != "fp32":
            _quantize(model, made.format)
        if state is not None:
            model.load_state_dict(state)
        mapping = None if raw is None else _mapping_of_queries(Mapping.from_config(dict(raw), labels=False), model)
        return cls(made, model.eval(), raw, mapping)

    def in_format(self, format: str) -> Tower:
        """This one with its tables in another number format; it is not to be used any more."""
        _quantize(self.model, format)
        return replace(self, made=replace(self.made, format=format))

    @torch.no_grad()
    def queries(self, batch: Batch | Sequence[Sequence[int]]) -> torch.Tensor:
        """`[Q, D]` for a batch, or for histories of table rows, oldest first."""
        return self.model.query(batch if isinstance(batch, Batch) else batch_of(self.model.item, batch))

    @torch.no_grad()
    def vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """`[C, D]` of the items in these rows of their table."""
        return torch.cat([self.model.items(part) for part in rows.split(1 << 16)])

    def write(self, folder: Path) -> None:
        """Weights, settings, and queries of drawn rows, by which `read` sees that it computes the same."""
        if self.raw is not None:
            write_mapping(self.raw, folder)
        saved = {"made": asdict(self.made), "state": self.model.state_dict(), "queries": self.queries(self.drawn())}
        torch.save(saved, folder / TOWER)

    def drawn(self) -> Batch:
        """Rows to compare queries on: of each feature a few ids, of all lists as many."""
        generator = torch.Generator().manual_seed(0)
        rows_of = {name: rows for rows, _, features in self.made.tables.values() for name in features}
        sizes = torch.randint(0, 60, (EXAMPLES,), generator=generator)
        total, features, lists = int(sizes.sum()), self.model.reads.features, self.model.reads.lists
        ids = [torch.randint(rows_of[name], (total,), generator=generator) for name in features]
        sparse = KeyedJaggedTensor(list(features), torch.cat(ids), lengths=sizes.repeat(len(features)))
        dense = torch.randn(EXAMPLES, self.made.num_dense, generator=generator)
        times = {name: 1_700_000_000 + 60 * torch.arange(total) for name in lists}
        return Batch(dense, sparse, torch.zeros(EXAMPLES), lists=times)

    @classmethod
    def read(cls, folder: Path) -> Tower:
        """
        Raises:
            ExportError: damaged, or its queries are not those of the machine that wrote it.
        """
        try:
            saved = torch.load(folder / TOWER, weights_only=True)
            raw = artifact.read_mapping(folder) if (folder / artifact.MAPPING).exists() else None
            tower = cls.of(Made(**saved["made"]), saved["state"], raw)
            apart = difference(tower.queries(tower.drawn()), saved["queries"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            raise ExportError(f"{folder / TOWER} cannot be read ({error}): make the index anew") from error
        if not apart <= TOLERANCE:
            raise ExportError(f"{folder / TOWER}: queries are {apart:.2g} from those when it was written; index anew")
        return tower


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest one, as a share of the largest number where that is above 1."""
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def _quantize(model: nn.Module, format: str) -> None:
    for path, collection in collections_in(model).items():
        replaced(model, path, EmbeddingCollection.from_float(collection, format))  # type: ignore[arg-type]


def _mapping_of_queries(whole: Mapping, model: Retriever) -> Mapping:
    """Of the columns that the model's query reads, and no others."""
    schema, reads = whole.schema, model.reads
    sequences = [
        one.model_copy(
            update={
                "ids": [name for name in one.ids if name in reads.features],
                "values": [value for value in one.values if f"{one.name}.{value.name}" in reads.lists],
            }
        )
        for one in schema.sequences
        if set(one.ids) & set(reads.features)
    ]
    sparse = [feature for feature in schema.sparse if feature.name in reads.features]
    update = {"sparse": sparse, "dense": schema.dense if reads.dense else [], "sequences": sequences}
    return Mapping(schema.model_copy(update=update), whole.rows_of, labels=False)
