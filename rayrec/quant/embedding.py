"""Embedding collections for inference: the same inputs and outputs as `rayrec.modules`', their tables in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn

from rayrec import modules
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules.embedding import check_tables, feature_names, output_names, tables_of
from rayrec.quant.check import check_lookups
from rayrec.quant.formats import TableFormat, quantize_rows
from rayrec.quant.layout import TablePlace, place_tables
from rayrec.quant.lookup import MEAN, SUM, Call, Reader, calls_of
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.sparse.keyed_jagged_tensor import check_input

Format = TableFormat | torch.dtype | str
Formats = Format | Mapping[str, Format]
ConfigT = TypeVar("ConfigT", EmbeddingBagConfig, EmbeddingConfig)


class TableBytes:
    """Which bytes a collection reads: its own buffer, or others that are put in its place for a while.

    It is no module, so that tracing may put an input of the graph here.
    """

    def __init__(self) -> None:
        self.instead: torch.Tensor | None = None


class _Quantized(nn.Module, Generic[ConfigT]):
    """Tables in one array of bytes, and the features that read them.

    Args:
        tables: their configs.
        places: where each table lies, in the order of `tables`.
        weights: uint8, all tables' bytes; None: they are given by `table_bytes` at every call.
        flag: of bags, ids carry weights; else the vectors come with their ids.
        row_alignment: of the places.
    """

    weights: torch.Tensor | None

    def __init__(
        self,
        tables: Sequence[ConfigT],
        places: Sequence[TablePlace],
        weights: torch.Tensor | None,
        flag: bool = False,
        row_alignment: int = 1,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self._configs: tuple[ConfigT, ...] = tuple(tables)
        self.places = tuple(places)
        self._flag, self.row_alignment = flag, row_alignment
        self.table_bytes = TableBytes()
        self.register_buffer("weights", weights)
        self._output_names = output_names(tables)
        self._calls: dict[tuple[object, ...], list[Call]] = {}
        self.eval()

    def formats(self) -> dict[str, TableFormat]:
        """Each table's format, by name."""
        return {place.table: place.format for place in self.places}

    @property
    def data(self) -> torch.Tensor:
        """uint8: all tables' bytes.

        Raises:
            ValueError: the collection was made without them.
        """
        found = self.weights if self.table_bytes.instead is None else self.table_bytes.instead
        if found is None:
            raise ValueError("the collection was made without its tables; give them by `table_bytes.instead`")
        return found

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.weights is None else self.weights.device

    def _check(self, features: KeyedJaggedTensor) -> None:
        """Ids, before the kernel. In an exported graph the caller checks the ids."""
        if not torch.compiler.is_exporting():
            check_lookups(features, self._configs)

    def _readers(self, features: KeyedJaggedTensor) -> list[Reader]:
        readers, column = [], 0
        for config, place in zip(self._configs, self.places, strict=True):
            mean = isinstance(config, EmbeddingBagConfig) and config.pooling is PoolingType.MEAN
            for feature in config.feature_names:
                key = features.index_per_key()[feature]
                readers.append(Reader(place, key, column, MEAN if mean else SUM))
                column += place.dim
        return readers

    def _calls_for(self, features: KeyedJaggedTensor) -> list[Call]:
        """Kept for the next batch, which mostly has the same keys."""
        keys, device = tuple(features.keys()), features.device()
        if torch.compiler.is_exporting():
            return calls_of(self._readers(features), device, self.row_alignment)
        if (keys, device) not in self._calls:
            self._calls = {(keys, device): calls_of(self._readers(features), device, self.row_alignment)}
        return self._calls[keys, device]


def _converted(
    module: modules.EmbeddingBagCollection | modules.EmbeddingCollection, data_type: Formats | None
) -> tuple[list[TablePlace], torch.Tensor, int]:
    """Places, bytes and row alignment of a float collection's tables."""
    configs, tables = tables_of(module)
    wanted = TableFormat.INT8 if data_type is None else data_type
    if not isinstance(wanted, Mapping):
        wanted = {config.name: wanted for config in configs}
    formats = {name: TableFormat.of(kind) for name, kind in wanted.items()}
    alignment = 16 if module.device.type == "cuda" else 1
    places, size = place_tables(configs, formats, alignment)
    data = torch.zeros(size, dtype=torch.uint8, device=module.device)
    for place in places:
        weight = tables.get_parameter(f"{place.table}.weight").detach()
        rows = quantize_rows(weight, place.format, place.table, alignment)
        data[place.begin : place.end] = rows.view(-1)
    return places, data, alignment


class EmbeddingBagCollection(_Quantized[EmbeddingBagConfig]):
    """Pooled vectors from tables in few bits; `from_float` makes one.

    Equal to the float collection whose tables hold the dequantized numbers, for any pooling, with and without weights.
    """

    @classmethod
    def from_float(
        cls, module: modules.EmbeddingBagCollection, data_type: Formats | None = None
    ) -> EmbeddingBagCollection:
        """The same tables in another format.

        Args:
            module: materialized, not on "meta".
            data_type: of all tables, or by table: "fp32", "fp16", "int8", "int4", or a torch dtype. Default: int8.

        Raises:
            ValueError: no such format, a table without one, or numbers that do not fit it.
        """
        places, data, alignment = _converted(module, data_type)
        return cls(module.embedding_bag_configs(), places, data, module.is_weighted(), alignment)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._flag

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors float32 `[B, sum of dims]` in the order of tables and their features.

        Raises:
            ValueError: a feature is missing, weights are missing from a weighted collection, offsets do not fit the
                ids, or an id is outside its table; names the feature.
        """
        check_input(features, feature_names(self._configs), self._flag)
        features = features.expanded()
        self._check(features)
        calls = self._calls_for(features)
        values, offsets = features.values().long(), features.offsets().long()
        weights = features.weights().float() if self._flag else None
        stride, pieces = features.stride(), []
        for call in calls:
            first = call.first_key * stride
            bags = offsets[first : first + len(call.columns) * stride + 1]
            pieces.append(call.run(self.data, values, bags, weights))
        keys = [name for names in self._output_names for name in names]
        dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]
        return KeyedTensor(keys, dims, _in_order(pieces, calls))


def _in_order(pieces: Sequence[torch.Tensor], calls: Sequence[Call]) -> torch.Tensor:
    """The features' vectors side by side as the output has them."""
    columns = [begin for call in calls for begin, _ in call.columns]
    if len(pieces) == 1 and columns == sorted(columns):
        return pieces[0]
    parts: list[tuple[int, torch.Tensor]] = []
    for piece, call in zip(pieces, calls, strict=True):
        widths = [width for _, width in call.columns]
        parts += zip((begin for begin, _ in call.columns), piece.split(widths, dim=1), strict=True)
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=1)


class EmbeddingCollection(_Quantized[EmbeddingConfig]):
    """A vector for every id, from tables in few bits; `from_float` makes one."""

    @classmethod
    def from_float(cls, module: modules.EmbeddingCollection, data_type: Formats | None = None) -> EmbeddingCollection:
        """As `EmbeddingBagCollection.from_float`."""
        places, data, alignment = _converted(module, data_type)
        return cls(module.embedding_configs(), places, data, module.need_indices(), alignment)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._flag

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """For each feature the vectors of its ids, float32 `values [N, D]` with the feature's lengths.

        Raises:
            ValueError: a feature is missing, offsets do not fit the ids, or an id is outside its table.
        """
        check_input(features, feature_names(self._configs))
        self._check(features)
        out: dict[str, JaggedTensor] = {}
        readers = iter(self._readers(features))
        for config, names in zip(self._configs, self._output_names, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                ids = features[feature]
                values = ids.values()
                (call,) = calls_of([next(readers)], features.device(), self.row_alignment)
                bags = torch.arange(values.shape[0] + 1, device=values.device)  # every id is its own bag
                vectors_ND = call.run(self.data, values.long(), bags, None)
                weights = values if self._flag else None
                out[name] = JaggedTensor(values=vectors_ND, weights=weights, lengths=ids.lengths())
        return out
