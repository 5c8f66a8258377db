"""Quantized embedding collections for inference, with the inputs and outputs of those in `rayrec.modules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn

from rayrec import modules
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules.embedding import check_tables, feature_names, output_names, tables_of
from rayrec.quant.check import IdCheck
from rayrec.quant.formats import TableFormat, quantize_rows
from rayrec.quant.layout import TablePlace, place_tables
from rayrec.quant.lookup import MEAN, SUM, Call, Reader, calls_of
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.sparse.keyed_jagged_tensor import check_input

Format = TableFormat | torch.dtype | str
Formats = Format | Mapping[str, Format]
ConfigT = TypeVar("ConfigT", EmbeddingBagConfig, EmbeddingConfig)


class TableBytes:
    """The bytes that a collection reads: its own buffer, or a replacement.

    Not a module, so that tracing may use an input of the graph as the replacement.
    """

    def __init__(self) -> None:
        self.instead: torch.Tensor | None = None


class _Quantized(nn.Module, Generic[ConfigT]):
    """Tables in one array of bytes, and the features that read them.

    Args:
        tables: Configs of the tables.
        places: Location of each table in the bytes, in the order of `tables`.
        weights: uint8, the bytes of all tables. None if `table_bytes` supplies them at every call.
        flag: For bags, whether ids carry weights; for sequences, whether the output holds the ids.
        row_alignment: Alignment of rows in bytes.
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
        self._features = feature_names(tables)
        self._id_check = IdCheck.of_tables(tables)
        self._calls: dict[tuple[object, ...], list[Call]] = {}
        self.eval()

    def formats(self) -> dict[str, TableFormat]:
        """Format of each table, by name."""
        return {table.table: table.format for table in self.places}

    @property
    def data(self) -> torch.Tensor:
        """uint8, the bytes of all tables.

        Raises:
            ValueError: The collection has no bytes.
        """
        data = self.weights if self.table_bytes.instead is None else self.table_bytes.instead
        if data is None:
            raise ValueError("the collection has no table bytes; set `table_bytes.instead`")
        return data

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.weights is None else self.weights.device

    def _check(self, features: KeyedJaggedTensor) -> None:
        """Checks ids before the kernel. In an exported graph the caller checks them."""
        if not torch.compiler.is_exporting():
            self._id_check(features)

    def _readers(self, features: KeyedJaggedTensor) -> list[Reader]:
        readers, column = [], 0
        for config, table in zip(self._configs, self.places, strict=True):
            mean = isinstance(config, EmbeddingBagConfig) and config.pooling is PoolingType.MEAN
            for feature in config.feature_names:
                key = features.index_per_key()[feature]
                readers.append(Reader(table, key, column, MEAN if mean else SUM))
                column += table.dim
        return readers

    def _calls_for(self, features: KeyedJaggedTensor) -> list[Call]:
        """The calls for these keys, cached for batches with equal keys."""
        keys, device = tuple(features.keys()), features.device()
        if torch.compiler.is_exporting():
            return self._new_calls(features, device)
        if (keys, device) not in self._calls:
            self._calls = {(keys, device): self._new_calls(features, device)}
        return self._calls[keys, device]

    def _new_calls(self, features: KeyedJaggedTensor, device: torch.device) -> list[Call]:
        return calls_of(self._readers(features), device, self.row_alignment)


def _converted(
    module: modules.EmbeddingBagCollection | modules.EmbeddingCollection, data_type: Formats | None
) -> tuple[list[TablePlace], torch.Tensor, int]:
    """Locations, bytes and row alignment of a float collection's quantized tables."""
    configs, tables = tables_of(module)
    formats_given = TableFormat.INT8 if data_type is None else data_type
    if not isinstance(formats_given, Mapping):
        formats_given = {config.name: formats_given for config in configs}
    formats = {name: TableFormat.of(kind) for name, kind in formats_given.items()}
    alignment = 16 if module.device.type == "cuda" else 1
    layout, size = place_tables(configs, formats, alignment)
    data = torch.zeros(size, dtype=torch.uint8, device=module.device)
    for table in layout:
        weight = tables.get_parameter(f"{table.table}.weight").detach()
        rows = quantize_rows(weight, table.format, table.table, alignment)
        data[table.begin : table.end] = rows.view(-1)
    return layout, data, alignment


class EmbeddingBagCollection(_Quantized[EmbeddingBagConfig]):
    """Pooled vectors from quantized tables. Create it with `from_float`.

    Equal to a float collection with the dequantized numbers, for any pooling, with and without weights.
    """

    @classmethod
    def from_float(
        cls, module: modules.EmbeddingBagCollection, data_type: Formats | None = None
    ) -> EmbeddingBagCollection:
        """Quantizes the tables of a float collection.

        Args:
            module: The collection, not on "meta".
            data_type: Format of all tables, or by table: "fp32", "fp16", "int8", "int4" or a torch dtype. Default:
                int8.

        Raises:
            ValueError: An unknown format, a table without a format, or numbers outside the format's range.
        """
        layout, data, alignment = _converted(module, data_type)
        return cls(module.embedding_bag_configs(), layout, data, module.is_weighted(), alignment)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._flag

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors float32 `[B, sum of dims]` in the order of tables and their features.

        Raises:
            ValueError: A feature is missing, weights of a weighted collection are missing, offsets do not match the
                ids, or an id is outside its table. Names the feature.
        """
        check_input(features, self._features, self._flag)
        features = features.expanded()
        self._check(features)
        calls = self._calls_for(features)
        values, offsets = features.values().long(), features.offsets().long()
        weights = features.weights().float() if self._flag else None
        stride, vectors = features.stride(), []
        for call in calls:
            first_bag = call.first_key * stride
            bags = offsets[first_bag : first_bag + len(call.columns) * stride + 1]
            vectors.append(call.run(self.data, values, bags, weights))
        keys = [name for names in self._output_names for name in names]
        dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]
        return KeyedTensor(keys, dims, _in_order(vectors, calls))


def _in_order(pieces: Sequence[torch.Tensor], calls: Sequence[Call]) -> torch.Tensor:
    """Concatenates the vectors of all features in the order of the output."""
    columns = [begin for call in calls for begin, _ in call.columns]
    if len(pieces) == 1 and columns == sorted(columns):
        return pieces[0]
    blocks: list[tuple[int, torch.Tensor]] = []
    for vectors, call in zip(pieces, calls, strict=True):
        widths = [width for _, width in call.columns]
        blocks += zip((begin for begin, _ in call.columns), vectors.split(widths, dim=1), strict=True)
    return torch.cat([vectors for _, vectors in sorted(blocks, key=lambda block: block[0])], dim=1)


class EmbeddingCollection(_Quantized[EmbeddingConfig]):
    """The vector of each id from quantized tables. Create it with `from_float`."""

    @classmethod
    def from_float(cls, module: modules.EmbeddingCollection, data_type: Formats | None = None) -> EmbeddingCollection:
        """See `EmbeddingBagCollection.from_float`."""
        layout, data, alignment = _converted(module, data_type)
        return cls(module.embedding_configs(), layout, data, module.need_indices(), alignment)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._flag

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Vectors of the ids of each feature: float32 `values [N, D]` with the feature's lengths.

        Raises:
            ValueError: A feature is missing, offsets do not match the ids, or an id is outside its table.
        """
        check_input(features, self._features)
        self._check(features)
        calls = iter(self._calls_for(features))
        outputs: dict[str, JaggedTensor] = {}
        for config, names in zip(self._configs, self._output_names, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                ids = features[feature]
                values = ids.values()
                bags = torch.arange(values.shape[0] + 1, device=values.device)  # each id is a bag
                vectors_ND = next(calls).run(self.data, values.long(), bags, None)
                weights = values if self._flag else None
                outputs[name] = JaggedTensor(values=vectors_ND, weights=weights, lengths=ids.lengths())
        return outputs

    def _new_calls(self, features: KeyedJaggedTensor, device: torch.device) -> list[Call]:
        """A call for each feature, since features have different numbers of ids."""
        return [call for reader in self._readers(features) for call in calls_of([reader], device, self.row_alignment)]
