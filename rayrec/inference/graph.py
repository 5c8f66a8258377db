"""A trained model as a function of tensors, with the tables as an argument.

The function is `logits(dense [B, N], values [n], offsets [F * B + 1], tables uint8, weights [n] or none)`. Of a
retriever, it returns queries `[B, D]`; if it reads lists of sequences, the row's time `[B]` and these lists follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rayrec import quant
from rayrec.inference.context import add_first_row, with_first_row
from rayrec.models import Batch, Retriever
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.quant import TablePlace
from rayrec.quant.embedding import TableBytes
from rayrec.quant.layout import TableConfig
from rayrec.sparse import KeyedJaggedTensor

Collection = EmbeddingBagCollection | EmbeddingCollection
_ROWS, _IDS = 3, 2  # rows, and ids per bag, of the example that a graph is traced and tested with


@dataclass(frozen=True, slots=True)
class QueryOutput:
    """The queries of a retriever.

    Args:
        dim: D, the width of a query; 0 before the graph is made.
        seen: The feature with the items that the answer leaves out; None: no item is left out.
    """

    dim: int = 0
    seen: str | None = None


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
        query: The function returns queries instead of logits. None: it returns logits.
        lists: Times and numbers of sequences, as `sequence.name`.
    """

    keys: tuple[str, ...]
    num_dense: int
    labels: tuple[str, ...] | None
    weighted: bool
    context: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    query: QueryOutput | None = None
    lists: tuple[str, ...] = ()

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
    """Replaces the collections by quantized ones that read the bytes of a `TableBytes`; returns these.

    A table without a place, which the function does not read, is left out.
    """
    slots = []
    for path, collection in collections_in(model).items():
        if not any(config.name in places for config in configs_of(collection)):
            continue
        table_places = [places[config.name] for config in configs_of(collection) if config.name in places]
        quantized: quant.EmbeddingBagCollection | quant.EmbeddingCollection
        if isinstance(collection, EmbeddingBagCollection):
            configs = [config for config in collection.embedding_bag_configs() if config.name in places]
            quantized = quant.EmbeddingBagCollection(configs, table_places, None, collection.is_weighted())
        else:
            configs_ = [config for config in collection.embedding_configs() if config.name in places]
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


# Operators that multiply matrices, and those between a parameter and its product that need no other tensor.
_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"})
_MOVES = frozenset(
    {
        "mT", "T", "t", "transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
        "contiguous", "__getitem__", "select", "narrow", "unbind", "split", "chunk", "expand", "cat", "concat", "stack",
        "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__",
    }
)  # fmt: skip


def _tensors_in(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _name_of(operator: Callable[..., Any]) -> str:
    """The name of an operator of a `TorchFunctionMode`; of a property, the property's."""
    name = operator.__name__
    return getattr(getattr(operator, "__self__", None), "__name__", name) if name == "__get__" else name


class _ParameterUses(TorchFunctionMode):
    """Records which parameters of a model are factors or biases of matrix products, and which have other uses.

    A product of one column is another use, so that logits stay float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.in_products, self.elsewhere = set[str](), set[str]()
        # The tensors are kept, because an id identifies a tensor only as long as it exists.
        self._names: dict[int, tuple[torch.Tensor, frozenset[str]]] = {
            id(tensor): (tensor, frozenset({name})) for name, tensor in model.named_parameters()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors_in((args, kwargs)), _tensors_in(result)
        names = frozenset[str]().union(*(self._names[id(x)][1] for x in inputs if id(x) in self._names))
        operator = _name_of(func)
        if not names or not (outputs or operator == "__setitem__"):
            return result
        if operator in _MOVES and all(id(x) in self._names for x in inputs):
            self._names |= {id(x): (x, names) for x in outputs}
        elif operator in _PRODUCTS and outputs[0].shape[-1] != 1:
            self.in_products |= names
        else:
            self.elsewhere |= names
        return result


class _Bfloat16Products(TorchFunctionMode):
    """Multiplies in bfloat16 if an operand is bfloat16; the other operands and the result are float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _name_of(func) in _PRODUCTS:
            dtypes = {x.dtype for x in _tensors_in((args, kwargs))}
            if dtypes == {torch.float32, torch.bfloat16}:

                def narrow(value: Any) -> Any:
                    return value.bfloat16() if isinstance(value, torch.Tensor) else value

                return func(*tree_map(narrow, args), **tree_map(narrow, kwargs or {})).float()
        return func(*args, **(kwargs or {}))


def matrix_parameters(scoring: Scoring) -> frozenset[str]:
    """The parameters that matrix products alone read, in the model's export.

    Raises:
        ValueError: As for `to_graph`.
    """
    uses: list[_ParameterUses] = []

    def recorder() -> _ParameterUses:
        uses.append(_ParameterUses(scoring.model))
        return uses[-1]

    scoring.mode = recorder
    try:
        to_graph(scoring)
    finally:
        scoring.mode = nullcontext
    elsewhere = set[str]().union(*(use.elsewhere for use in uses))
    return frozenset[str]().union(*(use.in_products for use in uses)) - elsewhere


def use_bfloat16(scoring: Scoring, parameters: AbstractSet[str]) -> None:
    """Converts parameters of `matrix_parameters` to bfloat16; their products are bfloat16, all else is float32."""
    originals = [parameter for name, parameter in scoring.model.named_parameters() if name in parameters]
    converted = {id(x): nn.Parameter(x.detach().bfloat16(), requires_grad=False) for x in originals}
    for module in scoring.model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in converted:  # also a parameter that modules share
                setattr(module, name, converted[id(parameter)])
    scoring.mode = _Bfloat16Products


class Scoring(nn.Module):
    """The function, around a model with replaced collections.

    Args:
        model: Takes a `Batch` and returns (loss, logits); or a `Retriever`, whose loss is removed.
        slots: The `TableBytes` of the collections.
        logit_shift: Added to every logit; corrects for negatives that training skipped.
        calibration: Maps the logits last; None: they stay.
        sequences: Features of `Batch.sequences`, by name; of a model that is not a `Retriever`, times and numbers are
            not inputs of the function.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[TableBytes],
        inputs: Inputs,
        logit_shift: float,
        sequences: Mapping[str, tuple[str, ...]] | None = None,
        calibration: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.calibration = calibration
        self.model, self.inputs, self.logit_shift, self.sequences = model, inputs, logit_shift, sequences or {}
        self.mode: Callable[[], AbstractContextManager[Any]] = nullcontext  # that the model runs in
        self._slots = tuple(slots)
        if isinstance(model, Retriever):
            setattr(model, "loss", nn.Identity())  # noqa: B010 (another type; its counts would be saved with the graph)
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
        *others: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[B]`, or `[B, T]` for several labels; queries `[B, D]` of a retriever.

        Args:
            others: Weights, if `inputs.weighted`; then, if there are `inputs.lists`, the rows' times and these lists.
        """
        weights, rest = (others[0], others[1:]) if self.inputs.weighted else (None, others)
        stride = dense.shape[0] + (self.inputs.context is not None)
        sparse = KeyedJaggedTensor(list(self.inputs.keys), values, weights, offsets=offsets, stride=stride)
        label = torch.zeros_like(dense[:, :1]) if dense.shape[1] else dense.new_zeros(dense.shape[0], 1)
        label = label[:, 0] if self.inputs.labels is None else label.expand(-1, len(self.inputs.labels))
        try:
            for slot in self._slots:
                slot.instead = tables
            batch = Batch(dense=dense, sparse=sparse, label=label, layout=self.sequences)
            if self.inputs.lists:
                batch = replace(batch, time=rest[0], lists=dict(zip(self.inputs.lists, rest[1:], strict=True)))
            with self.mode():
                logits = output_of(self.model, batch)
        finally:
            for slot in self._slots:
                slot.instead = None
        logits = logits + self.logit_shift if self.logit_shift else logits
        return logits if self.calibration is None else self.calibration(logits)


def output_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits of a model, or queries of a retriever."""
    if isinstance(model, Retriever):
        return model.query(batch)
    logits: torch.Tensor = model(batch)[1]
    return logits


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
    lists = _times_and_lists(batch, inputs) if inputs.lists else ()
    if not inputs.weighted:
        return (*plain, *lists)
    if context is not None:
        weights, _ = with_first_row(_weights(sparse), _weights(context), inputs.keys)
        return (*plain, weights, *lists)
    return (*plain, _weights(sparse).values(), *lists)


def _times_and_lists(batch: Batch, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Times `[B]`, `newest_times` by default, and the lists.

    Raises:
        ValueError: A list is missing.
    """
    missing = [name for name in inputs.lists if name not in batch.lists]
    if missing:
        raise ValueError(f"the batch has no list {missing[0]!r}; the model reads {list(inputs.lists)}")
    time = newest_times(batch, inputs) if batch.time is None else batch.time
    return (time, *(batch.lists[name] for name in inputs.lists))


def newest_times(batch: Batch, inputs: Inputs) -> torch.Tensor:
    """`[B]`, the time of the newest item of each row, in the first list of times; 0 for a row without items."""
    time = torch.zeros(batch.rows, dtype=torch.int64)
    for name in inputs.lists:
        values = batch.lists[name]
        if not values.is_floating_point():
            features = batch.layout[name.partition(".")[0]]
            offsets = batch.sparse[next(key for key in features if key in batch.sparse.keys())].offsets().long()
            has_items = offsets.diff() > 0
            time[has_items] = values[offsets[1:][has_items] - 1]
            break
    return time


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
    weights = [torch.ones(_IDS * bags)] if inputs.weighted else []
    times = [torch.zeros(_ROWS, dtype=torch.int64)] if inputs.lists else []
    # The lists of different sequences have different lengths.
    lists = [torch.zeros(_IDS * _ROWS + i, dtype=torch.int64) for i in range(len(inputs.lists))]
    return (*plain, *weights, *times, *lists)


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
    others: list[dict[int, object]] = [{0: ids}] if inputs.weighted else []
    if inputs.lists:
        others.append({0: rows})
        others += [{0: Dim(f"list_{number}", min=0, max=1 << 40)} for number in range(len(inputs.lists))]
    dynamic = (*shapes, tuple(others)) if others else tuple(shapes)
    try:
        with torch.no_grad():
            program = torch.export.export(scoring, _example(inputs), dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise ValueError(
            f"torch.export cannot trace the model: {error}\nThe forward of a model must not branch on tensor values; "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error
    return program


def output_width(program: ExportedProgram) -> int:
    """Columns of the function's output."""
    (output,) = program.graph.output_node().args[0]
    return int(output.meta["val"].shape[1])


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
