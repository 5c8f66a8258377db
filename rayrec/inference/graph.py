"""A trained model as one function of tensors: its collections read tables that are given with every call.

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
_ROWS, _IDS = 3, 2  # rows that a graph is made and tried with, ids in each bag


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the function takes.

    Args:
        keys: the sparse features, in order.
        num_dense: N.
        labels: names of several labels; None for one.
        weighted: ids have weights.
        context: the features that a first row may give to all rows (`context.py`): those that are pooled everywhere.
            The function then takes offsets [F * (B + 1) + 1]. None: it has no such row.
        kinds: "binary" or "number" for each label; None: all binary.
    """

    keys: tuple[str, ...]
    num_dense: int
    labels: tuple[str, ...] | None
    weighted: bool
    context: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """`[B, T]`: probabilities of binary labels, predictions of those that are numbers."""
        logits = logits.view(len(logits), 1 if self.labels is None else len(self.labels))
        if self.kinds is None:
            return logits.sigmoid()
        return torch.where(torch.tensor([kind == "number" for kind in self.kinds]), logits, logits.sigmoid())


def collections_in(model: nn.Module) -> dict[str, Collection]:
    """The embedding collections of a model, by path.

    Raises:
        ValueError: there is none, or two have a table of one name.
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    found = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    names = [config.name for module in found.values() for config in configs_of(module)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not found or twice:
        what = f"two collections have a table {twice[0]!r}" if twice else "the model has no embedding collection"
        raise ValueError(f"{what}; an export needs tables with names of their own")
    return found


def configs_of(collection: Collection) -> Sequence[TableConfig]:
    """The tables of a collection."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def pooled_keys(model: nn.Module, keys: Sequence[str]) -> tuple[str, ...]:
    """The features that are in no sequence."""
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
    inside = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
    return ".".join(part for part in (path, inside, table) if part)


def read_given_tables(model: nn.Module, places: Mapping[str, TablePlace]) -> list[TableBytes]:
    """Puts collections that read given bytes in the place of the model's own; returns where the bytes are given."""
    slots = []
    for path, collection in collections_in(model).items():
        own = [places[config.name] for config in configs_of(collection)]
        made: quant.EmbeddingBagCollection | quant.EmbeddingCollection
        if isinstance(collection, EmbeddingBagCollection):
            configs = collection.embedding_bag_configs()
            made = quant.EmbeddingBagCollection(configs, own, None, collection.is_weighted())
        else:
            made = quant.EmbeddingCollection(collection.embedding_configs(), own, None, collection.need_indices())
        replaced(model, path, made)
        slots.append(made.table_bytes)
    return slots


def replaced(model: nn.Module, path: str, made: nn.Module) -> nn.Module:
    """The model with another module at a path; "" is the model itself."""
    if not path:
        return made
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, made)
    return model


class Bfloat16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16; in and out come float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).float()


def with_bfloat16_layers(model: nn.Module) -> None:
    """Every `nn.Linear` inside becomes a `Bfloat16Linear`, but those of one output: the logits stay float32."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.out_features > 1:
                setattr(module, name, Bfloat16Linear(child))


class Scoring(nn.Module):
    """The function, around a model whose collections read given tables.

    Args:
        model: takes a `Batch` and returns (loss, logits).
        slots: where the collections' bytes are given.
        logit_shift: added to every logit; corrects for negatives that training left out.
        sequences: the ids of `Batch.sequences`, by name; times and numbers are no inputs of the function.
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
                setattr(module, name, buffer.clone())  # a graph cannot be saved with views of one another
        self.eval()

    def forward(
        self,
        dense: torch.Tensor,
        values: torch.Tensor,
        offsets: torch.Tensor,
        tables: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[B]`, or `[B, T]` of several labels."""
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
    """A batch of at least one row as the function's arguments; `context` is one row of some of `inputs.context`."""
    sparse = batch.sparse
    if inputs.context is None:
        values, offsets = sparse.values(), sparse.offsets()
    else:
        values, offsets = with_first_row(sparse, context, inputs.keys)
    plain = (batch.dense, values, offsets, tables)
    if not inputs.weighted:
        return plain
    if context is not None:
        weighted = [_weights(part) for part in (context, sparse)]
        return (*plain, with_first_row(weighted[1], weighted[0], inputs.keys)[0])
    return (*plain, _weights(sparse).values())


def _weights(part: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The ids' weights in their places; 1 where they have none."""
    found = part.weights_or_none()
    values = torch.ones(part.values().numel()) if found is None else found
    return KeyedJaggedTensor(part.keys(), values, offsets=part.offsets(), stride=part.stride())


def _example(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Arguments to trace with. No table is read then; a few bytes stand for them."""
    bags = (_ROWS + (inputs.context is not None)) * len(inputs.keys)
    values, offsets = torch.zeros(_IDS * bags, dtype=torch.int64), torch.arange(bags + 1) * _IDS
    plain = (torch.zeros(_ROWS, inputs.num_dense), values, offsets, torch.zeros(128, dtype=torch.uint8))
    return (*plain, torch.ones(_IDS * bags)) if inputs.weighted else plain


def exported(scoring: Scoring) -> ExportedProgram:
    """The function as a graph, for any number of rows and ids, and any tables of the same layout.

    Raises:
        ValueError: the model does what torch.export cannot follow; the text says where.
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
            f"torch.export cannot follow the model: {error}\nA model's forward must not decide by values of tensors; "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error
    return program


def same_with_context(scoring: Scoring, plain: Scoring, tables: torch.Tensor, rows_of: Mapping[str, int]) -> bool:
    """Whether rows score the same, bit by bit, with a context and with its bags in every row.

    Args:
        scoring, plain: the function with a row that all share, and without.
        rows_of: feature -> rows of its table.
    """
    inputs, drawn = scoring.inputs, torch.Generator().manual_seed(0)
    shared = list(inputs.context or ())
    sizes = {key: (1 if key in shared else _ROWS, _IDS) for key in inputs.keys}
    ids = {key: torch.randint(rows_of[key], size, generator=drawn) for key, size in sizes.items()}
    weights = {key: torch.rand(size, generator=drawn) for key, size in sizes.items()}

    def batch_of(keys: Sequence[str], rows: int) -> Batch:
        def of(parts: Mapping[str, torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
            return torch.cat([empty, *(parts[key].expand(rows, _IDS).reshape(-1) for key in keys)])

        values = of(ids, torch.empty(0, dtype=torch.int64))
        lengths = torch.full((len(keys) * rows,), _IDS)
        given = of(weights, torch.empty(0)) if inputs.weighted else None
        sparse = KeyedJaggedTensor(list(keys), values, given, lengths=lengths, stride=rows)
        return Batch(dense[:rows], sparse, torch.zeros(rows))

    dense = torch.randn(_ROWS, inputs.num_dense, generator=drawn)
    rest = batch_of([key for key in inputs.keys if key not in shared], _ROWS)
    context = batch_of(shared, 1).sparse
    try:
        with torch.no_grad():
            found = scoring(*arguments(rest, inputs, tables, context))
            expected = plain(*arguments(batch_of(inputs.keys, _ROWS), plain.inputs, tables))
    except (RuntimeError, ValueError, IndexError):
        return False  # the model looks at the ids itself
    return torch.equal(found, expected)
