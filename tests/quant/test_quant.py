"""Quantized collections equal the float ones whose tables hold the dequantized numbers, and refuse wrong ids."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rayrec import modules, quant
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.quant.formats import dequantize_rows, quantize_rows
from rayrec.sparse import KeyedJaggedTensor

FORMATS = ["fp32", "fp16", "int8", "int4"]


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], dict[str, str], list[str]]:
    """Tables with their formats, and the keys of the input: those that are read, in any order, and others."""
    features = [f"f{i}" for i in range(draw(st.integers(1, 5)))]
    tables, formats = [], {}
    for i in range(draw(st.integers(1, 4))):
        read = draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))
        table = EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=draw(st.integers(1, 9)),
            embedding_dim=4 * draw(st.integers(1, 5)),
            feature_names=read,
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        tables.append(table)
        formats[table.name] = draw(st.sampled_from(FORMATS))
    return tables, formats, draw(st.permutations(features))


def rows_of(tables: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for table in tables:
        for name in table.feature_names:
            found[name] = min(table.num_embeddings, found.get(name, table.num_embeddings))
    return found


def batch_for(tables: list[Any], keys: list[str], size: int, seed: int, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    rows = rows_of(tables)
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    values = [
        torch.randint(rows.get(key, 10**9), (int(lengths[i].sum()),), generator=generator) for i, key in enumerate(keys)
    ]
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys, ids, weights, lengths=lengths.view(-1), stride=size)


def dequantized(quantized: Any, table: str) -> torch.Tensor:
    """What lookups see of a table."""
    (place,) = (place for place in quantized.places if place.table == table)
    rows = quantized.data[place.begin : place.end].view(place.rows, place.row_bytes)
    return dequantize_rows(rows, place.format, place.dim)


def with_dequantized(module: Any, quantized: Any) -> Any:
    held = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
    with torch.no_grad():
        for name, table in held.items():
            table.weight.copy_(dequantized(quantized, name))
    return module


@settings(max_examples=60)
@given(drawn=collections(), size=st.integers(0, 5), seed=st.integers(0, 2**20), weighted=st.booleans())
def test_bags_equal_the_float_collection_of_the_dequantized_tables(
    drawn: Any, size: int, seed: int, weighted: bool
) -> None:
    tables, formats, keys = drawn
    module = modules.EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    quantized = quant.EmbeddingBagCollection.from_float(module, formats)
    batch = batch_for(tables, keys, size, seed, weighted)
    expected, found = with_dequantized(module, quantized)(batch), quantized(batch)
    assert found.keys() == expected.keys() and found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-6)


@settings(max_examples=20)
@given(drawn=collections(), size=st.integers(0, 4), seed=st.integers(0, 2**20))
def test_sequences_equal_the_float_collection_of_the_dequantized_tables(drawn: Any, size: int, seed: int) -> None:
    bags, formats, keys = drawn
    tables = [
        EmbeddingConfig(
            name=t.name, num_embeddings=t.num_embeddings, embedding_dim=8, feature_names=list(t.feature_names)
        )
        for t in bags
    ]
    module = modules.EmbeddingCollection(tables, need_indices=True, seed=seed)
    quantized = quant.EmbeddingCollection.from_float(module, formats)
    batch = batch_for(tables, keys, size, seed, weighted=False)
    expected, found = with_dequantized(module, quantized)(batch), quantized(batch)
    assert list(found) == list(expected)
    for name, jagged in expected.items():
        torch.testing.assert_close(found[name].values(), jagged.values(), rtol=0, atol=0)
        assert found[name].lengths().tolist() == jagged.lengths().tolist()
        assert found[name].weights().tolist() == jagged.weights().tolist()


@pytest.mark.parametrize(("format", "share"), [("fp32", 1.0), ("fp16", 0.5), ("int8", 68 / 256), ("int4", 36 / 256)])
def test_formats_take_their_bytes_and_stay_near(format: str, share: float) -> None:
    module = modules.EmbeddingBagCollection([table_of("t", 1000, 64)], seed=1)
    quantized = quant.EmbeddingBagCollection.from_float(module, format)
    weight = module.embedding_bags["t"].weight
    assert quantized.places[0].end == share * weight.numel() * 4
    steps = {"fp32": 0, "fp16": 2**-10, "int8": 2 / 255, "int4": 2 / 15}[format]
    span = weight.max() - weight.min()
    assert (dequantized(quantized, "t") - weight).abs().max() <= steps * span


def table_of(name: str, rows: int = 7, dim: int = 8, features: tuple[str, ...] = ("f",)) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))


@pytest.mark.parametrize("bad", [-1, -2, 7, 2**40])
def test_an_id_outside_its_table_is_named(bad: int) -> None:
    quantized = quant.EmbeddingBagCollection.from_float(
        modules.EmbeddingBagCollection([table_of("a", features=("x",)), table_of("b", features=("y",))])
    )
    batch = KeyedJaggedTensor(["x", "y"], torch.tensor([1, 2, 3, bad, 5]), lengths=torch.tensor([1, 1, 0, 3]))
    with pytest.raises(ValueError, match=re.escape(f"feature 'y', example 1: id {bad} is outside the rows [0, 7)")):
        quantized(batch)


@settings(max_examples=100)
@given(
    strides=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    varying=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    data=st.data(),
)
def test_the_first_id_outside_its_table_is_named_and_no_other(
    strides: list[int], varying: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    """A plain loop over lists is the oracle; the last feature is read by no table."""
    strides = [*strides, 1] if varying else [strides[0]] * (len(strides) + 1)
    keys = [f"f{i}" for i in range(len(strides))]
    rows = {key: data.draw(st.integers(1, 9)) for key in keys[:-1]}
    id_of_most = st.sampled_from([0] * 20 + [1, 8, 9, -1, 2**31 - 1, -(2**31)])
    lists = [[data.draw(st.lists(id_of_most, max_size=3)) for _ in range(stride)] for stride in strides]
    tables = [
        EmbeddingConfig(name=f"t {key}", num_embeddings=count, embedding_dim=4, feature_names=[key])
        for key, count in rows.items()
    ]
    quantized = quant.EmbeddingCollection.from_float(modules.EmbeddingCollection(tables))
    batch = KeyedJaggedTensor(
        keys,
        torch.tensor([id for key_lists in lists for ids in key_lists for id in ids], dtype=dtype),
        lengths=torch.tensor([len(ids) for key_lists in lists for ids in key_lists], dtype=torch.int64),
        stride_per_key_per_rank=[[stride] for stride in strides] if varying else None,
    )
    outside = [
        f"feature {key!r}, example {example}: id {id} is outside the rows [0, {rows[key]}) of table 't {key}'"
        for key, key_lists in zip(keys[:-1], lists[:-1], strict=True)
        for example, ids in enumerate(key_lists)
        for id in ids
        if not 0 <= id < rows[key]
    ]
    if outside:
        with pytest.raises(ValueError, match=re.escape(outside[0])):
            quantized(batch)
    else:
        quantized(batch)


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


def operators_of_second_call(module: Any, keys: list[str]) -> Counter[str]:
    batch = KeyedJaggedTensor(keys, torch.zeros(len(keys), dtype=torch.int64), offsets=torch.arange(len(keys) + 1))
    module(batch)
    with Operators() as operators:
        module(batch)
    return operators.counts


def test_bags_of_many_features_take_as_many_operators_as_those_of_few() -> None:
    def operators(count: int) -> int:
        keys = [f"f{i}" for i in range(count)]
        tables = [table_of(f"t {key}", features=(key,)) for key in keys]
        quantized = quant.EmbeddingBagCollection.from_float(modules.EmbeddingBagCollection(tables))
        return operators_of_second_call(quantized, keys).total()

    assert operators(60) == operators(3)


def test_sequences_make_the_tensors_of_their_tables_once() -> None:
    keys = ["x", "y"]
    tables = [EmbeddingConfig(name=f"t {key}", num_embeddings=7, embedding_dim=8, feature_names=[key]) for key in keys]
    quantized = quant.EmbeddingCollection.from_float(modules.EmbeddingCollection(tables))
    counts = operators_of_second_call(quantized, keys)
    assert counts["fbgemm::int_nbit_split_embedding_codegen_lookup_function"] == 2
    assert counts["aten::full"] == 0, "the placements of tables"


@pytest.mark.parametrize(
    ("offsets", "text"),
    [([0, 1, 9], "from 0 to the number of ids, 3"), ([0, 3, 2], "example 1"), ([1, 2, 3], "from 0")],
)
def test_offsets_that_do_not_fit_the_ids_are_refused(offsets: list[int], text: str) -> None:
    quantized = quant.EmbeddingBagCollection.from_float(modules.EmbeddingBagCollection([table_of("t")]))
    with pytest.raises(ValueError, match=text):
        quantized(KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), offsets=torch.tensor(offsets)))


def test_a_batch_size_that_varies_by_key_is_spread_by_its_inverse_indices() -> None:
    module = modules.EmbeddingBagCollection([table_of("a", features=("x",)), table_of("b", features=("y",))])
    quantized = quant.EmbeddingBagCollection.from_float(module, "fp32")
    batch = KeyedJaggedTensor(
        ["x", "y"],
        torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["x", "y"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )
    torch.testing.assert_close(quantized(batch).values(), module(batch).values())


@pytest.mark.parametrize("format", ["fp16", "int8", "int4"])
def test_a_number_that_does_not_fit_names_table_and_row(format: str) -> None:
    rows = torch.randn(5, 8)
    rows[3, 2] = float("nan") if format == "int8" else 1e30
    with pytest.raises(ValueError, match="table 'user', row 3"):
        quantize_rows(rows, quant.TableFormat.of(format), "user")


def test_padded_rows_of_a_gpu_hold_the_same_numbers() -> None:
    rows = torch.randn(9, 12)
    for format in quant.TableFormat:
        padded = quantize_rows(rows, format, "t", alignment=16)
        assert padded.shape[1] % 16 == 0
        plain = dequantize_rows(quantize_rows(rows, format, "t"), format, 12)
        torch.testing.assert_close(dequantize_rows(padded, format, 12), plain, rtol=0, atol=0)


def test_state_is_saved_and_loaded() -> None:
    first, second = (
        quant.EmbeddingBagCollection.from_float(modules.EmbeddingBagCollection([table_of("t")], seed=seed))
        for seed in (1, 2)
    )
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(dequantized(second, "t"), dequantized(first, "t"))


def test_a_wrong_format_or_table_is_named() -> None:
    module = modules.EmbeddingBagCollection([table_of("t")])
    with pytest.raises(ValueError, match="unknown table format 'int3'"):
        quant.EmbeddingBagCollection.from_float(module, "int3")
    with pytest.raises(ValueError, match="names the unknown table 'x'"):
        quant.EmbeddingBagCollection.from_float(module, {"t": "int8", "x": "int8"})
    with pytest.raises(ValueError, match="'t': no format"):
        quant.EmbeddingBagCollection.from_float(module, {})
