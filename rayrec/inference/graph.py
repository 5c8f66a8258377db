"""A trained model as a function of tensors, with the tables as an argument.

The function is `logits(dense [B, N], values [n], offsets [F * B + 1], tables uint8, weights [n] or none)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

from rayrec import quant
from rayrec.inference.context import add_first_row, with_first_row
from rayrec.models import Batch
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.quant import TablePlace
from rayrec.quant.embedding import TableBytes
from rayrec.quant.layout import TableConfig
from rayrec.sparse import KeyedJaggedTensor

Collection = EmbeddingBagCollection | EmbeddingCollection
_ROWS, _IDS = 3, 2  # rows, and ids per bag, of the example that a graph is traced and tested with


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs and labels of the function.

    Args:
        keys: Sparse features, in order.
        num_dense: N.
        labels: Names of several labels; None for a single label.
        weighted: Ids have weights.
        context: Features that a context row may provide for all rows (`context.py`): all that are only pooled.
            Offsets are then [F * (B + 1) + 1]. None: without a context row.
        kinds: "binary" or "number" for each label; None: all binary.
    """

    keys: tuple[str, ...]
    num_dense: int
    labels: tuple[str, ...] | None
    weighted: bool
    context: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """`[B, T]`: probabilities of binary labels, predicted numbers of others."""
        logits = logits.view(len(logits), 1 if self.labels is None else len(self.labels))
        if self.kinds is None:
            return logits.sigmoid()
        return torch.where(torch.tensor([kind == "number" for kind in self.kinds]), logits, logits.sigmoid())


def collections_in(model: nn.Module) -> dict[str, Collection]:
    """The embedding collections of a model, by path.

    Raises:
        ValueError: The model has no collection, or two tables have the same name.
    """
    types = (EmbeddingBagCollection, EmbeddingCollection)
    collections = {path: module for path, module in model.named_modules() if isinstance(module, types)}
    if not collections:
        raise ValueError("the model has no embedding collection; an export needs one")
    names = [config.name for module in collections.values() for config in configs_of(module)]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"two collections have a table {duplicates[0]!r}; an export needs unique table names")
    return collections


def configs_of(collection: Collection) -> Sequence[TableConfig]:
    """The tables of a collection."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def pooled_keys(model: nn.Module, keys: Sequence[str]) -> tuple[str, ...]:
    """The features that no `EmbeddingCollection` reads."""
    sequences = {
        name
        for collection in collections_in(model).values()
        for config in configs_of(collection)
        for name in config.feature_names
        if isinstance(collection, EmbeddingCollection)
    }
    return tuple(key for key in keys if key not in sequences)


def table_path(path: str, collection: Collection, table: str) -> str:
    """The path of a table's module in the model."""
    attribute = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
    return ".".join(filter(None, (path, attribute, table)))


def replace_collections(model: nn.Module, places: Mapping[str, TablePlace]) -> list[TableBytes]:
    """Replaces the collections by quantized ones that read the bytes of a `TableBytes`; returns these."""
    slots = []
    for path, collection in collections_in(model).items():
        table_places = [places[config.name] for config in configs_of(collection)]
        quantized: quant.EmbeddingBagCollection | quant.EmbeddingCollection
        if isinstance(collection, EmbeddingBagCollection):
            configs = collection.embedding_bag_configs()
            quantized = quant.EmbeddingBagCollection(configs, table_places, None, collection.is_weighted())
        else:
            configs_ = collection.embedding_configs()
            quantized = quant.EmbeddingCollection(configs_, table_places, None, collection.need_indices())
        replace_module(model, path, quantized)
        slots.append(quantized.table_bytes)
    return slots


def replace_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Replaces the module at a path, in place; returns the model, which for the path "" is `module`."""
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
    return model


class Bfloat16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16; input and output are float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).float()


def with_bfloat16_layers(model: nn.Module) -> None:
    """Replaces every `nn.Linear` by a `Bfloat16Linear`, except those with one output: logits stay float32."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.out_features > 1:
                setattr(module, name, Bfloat16Linear(child))


class Scoring(nn.Module):
    """The function, around a model with replaced collections.

    Args:
        model: Takes a `Batch` and returns (loss, logits).
        slots: The `TableBytes` of the collections.
        logit_shift: Added to every logit; corrects for negatives that training skipped.
        sequences: Features of `Batch.sequences`, by name; times and numbers are not inputs of the function.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[TableBytes],
        inputs: Inputs,
        logit_shift: float,
        sequences: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.logit_shift, self.sequences = model, inputs, logit_shift, sequences or {}
        self._slots = tuple(slots)
        if inputs.context is not None:
            for module in model.modules():
                if isinstance(module, quant.EmbeddingBagCollection | quant.EmbeddingCollection):
                    module.register_forward_hook(add_first_row)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())  # torch.export cannot save buffers that share memory
        self.eval()

    def forward(
        self,
        dense: torch.Tensor,
        values: torch.Tensor,
        offsets: torch.Tensor,
        tables: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[B]`, or `[B, T]` for several labels."""
        stride = dense.shape[0] + (self.inputs.context is not None)
        sparse = KeyedJaggedTensor(list(self.inputs.keys), values, weights, offsets=offsets, stride=stride)
        label = torch.zeros_like(dense[:, :1]) if dense.shape[1] else dense.new_zeros(dense.shape[0], 1)
        label = label[:, 0] if self.inputs.labels is None else label.expand(-1, len(self.inputs.labels))
        try:
            for slot in self._slots:
                slot.instead = tables
            _, logits = self.model(Batch(dense=dense, sparse=sparse, label=label, layout=self.sequences))
        finally:
            for slot in self._slots:
                slot.instead = None
        return logits + self.logit_shift if self.logit_shift else logits


def arguments(
    batch: Batch, inputs: Inputs, tables: torch.Tensor, context: KeyedJaggedTensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The function's arguments for a batch of at least one row.

    Args:
        context: One row of some of `inputs.context`.
    """
    sparse = batch.sparse
    if inputs.context is None:
        values, offsets = sparse.values(), sparse.offsets()
    else:
        values, offsets = with_first_row(sparse, context, inputs.keys)
    plain = (batch.dense, values, offsets, tables)
    if not inputs.weighted:
        return plain
    if context is not None:
        weights, _ = with_first_row(_weights(sparse), _weights(context), inputs.keys)
        return (*plain, weights)
    return (*plain, _weights(sparse).values())


def _weights(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags with the weights as values; 1 for ids without weights."""
    weights = sparse.weights_or_none()
    values = torch.ones(sparse.values().numel()) if weights is None else weights
    return KeyedJaggedTensor(sparse.keys(), values, offsets=sparse.offsets(), stride=sparse.stride())


def _example(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Arguments to trace with. Tracing reads no table, so a few bytes suffice."""
    bags = (_ROWS + (inputs.context is not None)) * len(inputs.keys)
    values, offsets = torch.zeros(_IDS * bags, dtype=torch.int64), torch.arange(bags + 1) * _IDS
    plain = (torch.zeros(_ROWS, inputs.num_dense), values, offsets, torch.zeros(128, dtype=torch.uint8))
    return (*plain, torch.ones(_IDS * bags)) if inputs.weighted else plain


def to_graph(scoring: Scoring) -> ExportedProgram:
    """Exports the function as a graph for any number of rows and ids, and any tables with the same layout.

    Raises:
        ValueError: torch.export cannot trace the model; the text says where.
    """
    inputs = scoring.inputs
    rows = Dim("rows", min=1, max=1 << 24)
    ids = Dim("ids", min=0, max=1 << 40)
    size = Dim("bytes", min=2, max=1 << 50)
    keys = len(inputs.keys)
    bounds = keys * rows + (1 if inputs.context is None else keys + 1)
    shapes: list[dict[int, object]] = [{0: rows}, {0: ids}, {0: bounds}, {0: size}]
    if inputs.weighted:
        shapes.append({0: ids})
    try:
        with torch.no_grad():
            program = torch.export.export(scoring, _example(inputs), dynamic_shapes=tuple(shapes), strict=False)
    except Exception as error:
        raise ValueError(
            f"torch.export cannot trace the model: {error}\nThe forward of a model must not branch on tensor values; "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error
    return program


def same_with_context(scoring: Scoring, plain: Scoring, tables: torch.Tensor, rows_of: Mapping[str, int]) -> bool:
    """Whether scores with a context row are bit by bit those with the context's bags in every row.

    Args:
        scoring: The function with a context row.
        plain: The function without.
        rows_of: feature → rows of its table.
    """
    inputs, generator = scoring.inputs, torch.Generator().manual_seed(0)
    shared = list(inputs.context or ())
    sizes = {key: (1 if key in shared else _ROWS, _IDS) for key in inputs.keys}
    ids = {key: torch.randint(rows_of[key], size, generator=generator) for key, size in sizes.items()}
    weights = {key: torch.rand(size, generator=generator) for key, size in sizes.items()}

    def batch_of(keys: Sequence[str], rows: int) -> Batch:
        def concat(by_key: Mapping[str, torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
            return torch.cat([empty, *(by_key[key].expand(rows, _IDS).reshape(-1) for key in keys)])

        values = concat(ids, torch.empty(0, dtype=torch.int64))
        lengths = torch.full((len(keys) * rows,), _IDS)
        bag_weights = concat(weights, torch.empty(0)) if inputs.weighted else None
        sparse = KeyedJaggedTensor(list(keys), values, bag_weights, lengths=lengths, stride=rows)
        return Batch(dense[:rows], sparse, torch.zeros(rows))

    dense = torch.randn(_ROWS, inputs.num_dense, generator=generator)
    rest = batch_of([key for key in inputs.keys if key not in shared], _ROWS)
    context = batch_of(shared, 1).sparse
    try:
        with torch.no_grad():
            scores = scoring(*arguments(rest, inputs, tables, context))
            expected = plain(*arguments(batch_of(inputs.keys, _ROWS), plain.inputs, tables))
    except (RuntimeError, ValueError, IndexError):
        return False  # the model reads the ids itself
    return torch.equal(scores, expected)
