"""`Trained`, a trained model and its rows; `CheckpointModel`, its modules and tables, read from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rayrec.inference import graph
from rayrec.inference.artifact import ExportError
from rayrec.inference.graph import Inputs
from rayrec.inference.parity import Score
from rayrec.inference.tables import PartialTable, fill_partial
from rayrec.models import Batch, Retriever
from rayrec.models.item_features import ItemFeatures
from rayrec.quant.layout import TableConfig

if TYPE_CHECKING:
    from rayrec.checkpoint.weights import CheckpointWeights
    from rayrec.dynamic_ids import IdMap

BLOCK_ITEMS = 65_536


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model.

    Args:
        make_model: Creates the model with its tables on "meta".
        weights: Weights of the checkpoint.
        inputs: Inputs of the model; of a retriever, those of its query.
        mapping: `schema` and `tables` of the training config, as plain values, with the features of `inputs`.
        rows_of: feature → rows that its ids map to.
        batches: Iterates over the evaluation rows; with a number, over a sample of about that many rows.
        recorded: Metrics that the trainer recorded for this checkpoint and these rows; None if it did not.
        logit_shift: Added to logits; corrects for negatives that training skipped.
        origin: Run, checkpoint and step, for the index.
        ids: Feature with dynamic ids → the map of its ids to rows. Batches have rows.
    """

    make_model: Callable[[], nn.Module]
    weights: CheckpointWeights
    inputs: Inputs
    mapping: Mapping[str, Any]
    rows_of: Mapping[str, int]
    batches: Callable[[int | None], Iterable[Batch]]
    recorded: Mapping[str, Any] | None = None
    logit_shift: float = 0.0
    origin: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, IdMap] = field(default_factory=dict)


class CheckpointModel:
    """The modules of a trained model, with dense parameters of its checkpoint and tables that are read in blocks.

    Attributes:
        paths: table → path of its module in the model.
        tables: All tables of the model.
        dense: Dense parameters and buffers, by name.

    Raises:
        ExportError: A table of the model is not in the checkpoint.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        collections = graph.collections_in(trained.make_model())
        self.tables: list[TableConfig] = [
            config for collection in collections.values() for config in graph.configs_of(collection)
        ]
        self.paths = {
            config.name: graph.table_path(path, collection, config.name)
            for path, collection in collections.items()
            for config in graph.configs_of(collection)
        }
        self._check_tables()
        self.dense = trained.weights.dense()

    def read(self, table: str, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of a table."""
        return self.trained.weights.read_rows(self.paths[table], start, stop)

    def module(self, tables: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """The model in evaluation mode.

        Args:
            tables: Tables by name; None leaves them on "meta".

        Raises:
            ExportError: A parameter of the model is not in the checkpoint.
        """
        model = self.trained.make_model()
        for name, tensor in self._without_tables(model.state_dict()):
            if name not in self.dense or self.dense[name].shape != tensor.shape:
                raise ExportError(
                    f"the checkpoint {self.trained.weights.path} has no parameter {name!r} of shape "
                    f"{tuple(tensor.shape)}; export with the config of its run"
                )
            tensor.copy_(self.dense[name])
        self._set_tables(model, tables or {})
        return model.eval()

    def _set_tables(self, model: nn.Module, tables: Mapping[str, nn.Parameter]) -> None:
        for name, table in tables.items():
            model.get_submodule(self.paths[name]).register_parameter("weight", table)

    def dense_sizes(self) -> dict[str, int]:
        """Numbers in each dense parameter."""
        parameters = dict(self.trained.make_model().named_parameters())
        return {name: parameter.numel() for name, parameter in self._without_tables(parameters)}

    def partial_tables(self) -> dict[str, PartialTable]:
        """A table without rows for each table, which records lookups."""
        return {table.name: PartialTable.of(table.num_embeddings, table.embedding_dim) for table in self.tables}

    def score(self, tables: Mapping[str, nn.Parameter], after: Callable[[], None] | None = None) -> Score:
        """Logits or queries of the model itself with torch's lookups, to compare an export with.

        Args:
            tables: Tables by name.
            after: Called after each batch.
        """
        model, shift = self.module(tables), self.trained.logit_shift

        def score(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                output = graph.output_of(model, batch)
            if after is not None:
                after()
            return output if isinstance(model, Retriever) else output + shift

        return score

    def item_vectors(
        self, rows_I: torch.Tensor, features: ItemFeatures | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Vectors of a retriever's items, in blocks that follow each other in the item table; memory is bounded.

        Args:
            rows_I: Rows of the item table; -1 for an item without one.
            features: Of these items; None: those that the model knows of the rows.

        Returns:
            Pairs of indices `[n]` in `rows_I` and vectors `[n, D]`.
        """
        model = self.module()
        assert isinstance(model, Retriever)
        for indices in rows_I.argsort().split(BLOCK_ITEMS):
            tables = self.partial_tables()
            self._set_tables(model, tables)
            with torch.no_grad():
                given = {} if features is None else {"features": features.taken(indices)}
                model.items(rows_I[indices], **given)  # records the rows of tables that it reads
                fill_partial(tables, self.tables, self.read)
                yield indices, model.items(rows_I[indices], **given)

    def _without_tables(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        prefixes = tuple(f"{path}." for path in self.paths.values())
        return ((name, tensor) for name, tensor in tensors.items() if not name.startswith(prefixes))

    def _check_tables(self) -> None:
        saved = self.trained.weights.tables()
        for table in self.tables:
            shape = (table.num_embeddings, table.embedding_dim)
            saved_shape = saved.get(self.paths[table.name])
            if saved_shape is None or tuple(saved_shape) != shape:
                problem = "does not have it" if saved_shape is None else f"has {tuple(saved_shape)}"
                raise ExportError(
                    f"table {table.name!r} has (rows, dim) {shape} in the model, but the checkpoint "
                    f"{self.trained.weights.path} {problem}; export with the config of its run"
                )
