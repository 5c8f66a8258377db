"""The query tower of a built-in retriever, stored with its index.

It is rebuilt from its settings, without code of the run, and verified with the query vectors that it computed when it
was written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from rayrec.data import Identity, Mapping, Vocabulary
from rayrec.inference import artifact
from rayrec.inference.artifact import ExportError
from rayrec.inference.export import write_mapping
from rayrec.inference.graph import collections_in, replace_module
from rayrec.models import RETRIEVERS, Batch, Retriever
from rayrec.models.retriever import batch_of
from rayrec.modules import EmbeddingBagConfig
from rayrec.quant.embedding import EmbeddingCollection
from rayrec.sparse import KeyedJaggedTensor

TOWER, EXAMPLES = "tower.pt", 32
# Another processor or another release of torch rounds otherwise: above the first, a warning; above the second, refused.
TOLERANCE, MAX_DEVIATION = 1e-5, 1e-3
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """The settings to build a model from.

    Args:
        name: A key of `RETRIEVERS`.
        settings: `model.args` of the config.
        tables: name → (rows, width, features).
        num_dense: Number of dense features.
        format: Number format of the tables.
    """

    name: str
    settings: dict[str, Any]
    tables: dict[str, tuple[int, int, list[str]]]
    num_dense: int = 0
    format: str = "fp32"


@dataclass(frozen=True, slots=True)
class Tower:
    """A model that computes query vectors.

    Args:
        model: In evaluation mode, on the CPU.
        raw: `schema` and `tables` of the run's config; None: the model reads histories of table rows.
        mapping: Maps the columns that the query reads.
    """

    spec: TowerSpec
    model: Retriever
    raw: Dict[str, Any] | None = None
    mapping: Mapping | None = None

    @classmethod
    def of(
        cls, spec: TowerSpec, state: Dict[str, torch.Tensor] | None = None, raw: Dict[str, Any] | None = None
    ) -> Tower:
        """
        Args:
            state: State dict, with tables in `spec.format`; None: initial weights.
            raw: `schema` and `tables` of the run's config.
        """
        tables = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features))
            for name, (rows, dim, features) in spec.tables.items()
        ]
        model = RETRIEVERS[spec.name](tables, spec.num_dense, tables_device="cpu", **spec.settings)
        if spec.format != "fp32":
            _quantize(model, spec.format)
        if state is not None:
            model.load_state_dict(state)
        mapping = None if raw is None else _mapping_of_queries(Mapping.from_config(dict(raw), labels=False), model)
        return cls(spec, model.eval(), raw, mapping)

    def in_format(self, format: str) -> Tower:
        """The tower with quantized tables. Modifies the model of this one; do not use it afterwards."""
        _quantize(self.model, format)
        return replace(self, spec=replace(self.spec, format=format))

    @torch.no_grad()
    def queries(self, batch: Batch | Sequence[Sequence[int]]) -> torch.Tensor:
        """`[Q, D]` for a batch, or for histories of table rows, oldest first."""
        return self.model.query(batch if isinstance(batch, Batch) else batch_of(self.model.item, batch))

    @torch.no_grad()
    def vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors `[C, D]` of the items in these rows of the item table."""
        return torch.cat([self.model.items(chunk) for chunk in rows.split(1 << 16)])

    def write(self, folder: Path) -> None:
        """Writes weights, settings, and the queries of example rows, with which `read` verifies the tower."""
        if self.raw is not None:
            write_mapping(self.raw, folder)
        queries = self.queries(self.examples())
        torch.save({"made": asdict(self.spec), "state": self.model.state_dict(), "queries": queries}, folder / TOWER)

    def examples(self) -> Batch:
        """Random rows to compare queries on."""
        generator = torch.Generator().manual_seed(0)
        rows_of = {name: rows for rows, _, features in self.spec.tables.values() for name in features}
        sizes = torch.randint(0, 60, (EXAMPLES,), generator=generator)
        total, features, lists = int(sizes.sum()), self.model.reads.features, self.model.reads.lists
        ids = [torch.randint(rows_of[name], (total,), generator=generator) for name in features]
        sparse = KeyedJaggedTensor(list(features), torch.cat(ids), lengths=sizes.repeat(len(features)))
        dense = torch.randn(EXAMPLES, self.spec.num_dense, generator=generator)
        times = {name: 1_700_000_000 + 60 * torch.arange(total) for name in lists}
        return Batch(dense, sparse, torch.zeros(EXAMPLES), lists=times)

    @classmethod
    def read(cls, folder: Path) -> Tower:
        """
        Raises:
            ExportError: The file is damaged, or its queries differ by more than `MAX_DEVIATION` from those when it was
                written. Smaller differences are logged: they change the order of items with nearly equal scores only.
        """
        try:
            saved = torch.load(folder / TOWER, weights_only=True)
            raw = artifact.read_mapping(folder) if (folder / artifact.MAPPING).exists() else None
            tower = cls.of(TowerSpec(**saved["made"]), saved["state"], raw)
            deviation = difference(tower.queries(tower.examples()), saved["queries"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            raise ExportError(f"{folder / TOWER} cannot be read ({error}): write the index again") from error
        if not deviation <= TOLERANCE:
            text = f"{folder / TOWER}: queries differ by {deviation:.2g} from those when it was written"
            if not deviation <= MAX_DEVIATION:
                raise ExportError(f"{text}; write the index again, on this machine if it was written on another kind")
            _logger.warning("%s, as on another processor or release of torch; served all the same", text)
        return tower


class ItemRows:
    """Table rows of ids, as the mapping of a feature gives them.

    Args:
        mapping: Has the feature.
    """

    def __init__(self, mapping: Mapping, feature: str) -> None:
        sparse = next(sparse for sparse in mapping.schema.sparse if sparse.name == feature)
        scalar = sparse.model_copy(update={"kind": "id", "column": "id", "max_length": None})
        schema = mapping.schema.model_copy(update={"sparse": [scalar], "dense": [], "sequences": []})
        self._rule, self._mapping = scalar.mapping, Mapping(schema, mapping.rows_of, labels=False)

    def __call__(self, ids: pa.Array | pa.ChunkedArray) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns:
            rows `[n]`, -1 for ids that the mapping refuses or drops; bool `[n]`, False for ids that have no row of
            their own, because they are outside of the vocabulary or of the table's rows.

        Raises:
            DataError: The ids have another type than in training.
        """
        batch, errors = self._mapping.to_batch_and_errors(pa.table({"id": ids}))
        rows = torch.full((len(ids),), -1)
        rows[batch.sparse.lengths() > 0] = batch.sparse.values().long()
        rows[list(errors)] = -1
        known = rows >= 0
        if isinstance(self._rule, Vocabulary):
            known &= rows >= self._rule.oov_rows
        elif isinstance(self._rule, Identity):
            known &= torch.from_numpy(rows.numpy() == ids.to_numpy(zero_copy_only=False))
        return rows, known


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Maximum difference, relative to the largest expected number if that is above 1."""
    return float((actual - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def _quantize(model: nn.Module, format: str) -> None:
    for path, collection in collections_in(model).items():
        replace_module(model, path, EmbeddingCollection.from_float(collection, format))  # type: ignore[arg-type]


def _mapping_of_queries(mapping: Mapping, model: Retriever) -> Mapping:
    """The mapping of only the columns that the model's query reads."""
    schema, reads = mapping.schema, model.reads
    sequences = [
        sequence.model_copy(
            update={
                "ids": [name for name in sequence.ids if name in reads.features],
                "values": [value for value in sequence.values if f"{sequence.name}.{value.name}" in reads.lists],
            }
        )
        for sequence in schema.sequences
        if set(sequence.ids) & set(reads.features)
    ]
    sparse = [feature for feature in schema.sparse if feature.name in reads.features]
    update = {"sparse": sparse, "dense": schema.dense if reads.dense else [], "sequences": sequences}
    return Mapping(schema.model_copy(update=update), mapping.rows_of, labels=False)
