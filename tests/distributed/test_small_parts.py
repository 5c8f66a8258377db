"""Small decisions of the core by themselves: kernels of a table, buffers, sizes on the wire, codecs, helpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import EmbeddingComputeKernel, NumberFormat, Span, fp8_rows, int8_rows
from rayrec.distributed.comm.wire import FORMATS
from rayrec.distributed.kernel import RULES, OptimizerSpec, check_trainable, pooling_group, vector_group
from rayrec.distributed.kernel.choice import fbgemm_updates
from rayrec.distributed.kernel.fused import FusedVectorKernel
from rayrec.distributed.kernel.local_table import LocalTable, Lookups
from rayrec.distributed.kernel.optimizer_formulas import rounded
from rayrec.distributed.kernel.rows import StackedTables
from rayrec.distributed.kernel.tbe import padded
from rayrec.modules import DataType, EmbeddingBagConfig
from rayrec.torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from rayrec.torchrec.distributed.utils import (
    add_prefix_to_state_dict,
    append_prefix,
    filter_state_dict,
    merge_fused_params,
    none_throws,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the GPU is only named: nothing is computed there
K = EmbeddingComputeKernel


def config(dim: int = 8, data_type: DataType = DataType.FP32, features: int = 1, rows: int = 10) -> EmbeddingBagConfig:
    names = [f"f{n}" for n in range(features)]
    return EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=dim, feature_names=names, data_type=data_type
    )


def spec(name: str = "rowwise_adagrad", **settings: Any) -> OptimizerSpec:
    return OptimizerSpec.from_fused_params({"optimizer": RULES[name].kind, "learning_rate": 0.1, **settings})


def local(table: EmbeddingBagConfig, optimizer: OptimizerSpec | None = None, kernel: K = K.FUSED) -> LocalTable:
    rows, cols = Span(0, table.num_embeddings), Span(0, table.embedding_dim)
    return LocalTable(config=table, rows=rows, cols=cols, kernel=kernel, optimizer=optimizer or spec())


@pytest.mark.parametrize(
    ("optimizer", "table", "device", "trains"),
    [
        (None, config(), CPU, False),
        (spec(), config(), CPU, True),
        (spec(), config(), GPU, True),
        (spec(), config(data_type=DataType.BF16), CPU, False),
        (spec(), config(data_type=DataType.BF16), GPU, False),
        (spec(), config(data_type=DataType.FP16), CPU, True),
        (spec(stochastic_rounding=True), config(data_type=DataType.FP16), CPU, False),
        (spec(stochastic_rounding=True), config(), CPU, True),
        (spec(stochastic_rounding=True), config(data_type=DataType.FP16), GPU, True),
        (spec(weight_decay=0.1), config(), CPU, False),
        (spec("sgd", weight_decay=0.1), config(), CPU, False),
        (spec("adam"), config(), GPU, True),
        (spec("adam", weight_decay=0.1), config(), GPU, True),
        (spec(), config(dim=6), GPU, True),
    ],
)
def testfbgemm_updates_what_its_kernels_can(optimizer: Any, table: Any, device: torch.device, trains: bool) -> None:
    assert fbgemm_updates(optimizer, table, table.embedding_dim, device) == trains
    for kernel in (K.FUSED, K.DENSE, K.FUSED_UVM, K.FUSED_UVM_CACHING):
        in_vain = kernel in (K.FUSED_UVM, K.FUSED_UVM_CACHING) and device is GPU and not trains
        if in_vain and optimizer is not None:
            with pytest.raises(ValueError, match=f"table 't': kernel '{kernel.value}' trains by fbgemm only"):
                check_trainable(table, kernel, optimizer, device)
        else:
            check_trainable(table, kernel, optimizer, device)


def test_states_of_two_kinds_need_a_width_that_fbgemm_has() -> None:
    for name, rule in RULES.items():
        kinds = len(set(rule.rowwise.values()))
        assert fbgemm_updates(spec(name), config(8), 8, GPU)
        assert fbgemm_updates(spec(name), config(6), 6, GPU) == (kinds < 2)


def test_tables_share_a_kernel_where_they_are_trained_alike() -> None:
    def same(a: LocalTable, b: LocalTable, device: torch.device, group: Any = pooling_group) -> bool:
        return bool(group(a, device) == group(b, device))

    narrow, wide, odd = (local(config(dim)) for dim in (8, 16, 6))
    adagrad = [local(config(dim), spec("adagrad")) for dim in (8, 6)]
    for device in (CPU, GPU):
        assert same(narrow, wide, device) and same(*adagrad, device)
        assert not same(narrow, odd, device), "a padded width has its own scale where state has one number a row"
    shared = local(config(8, features=2))
    assert same(narrow, shared, CPU) and same(narrow, shared, GPU)
    plain = [local(config(dim), spec(weight_decay=0.1)) for dim in (8, 16)]
    assert not same(*plain, CPU), "one matrix has one width"
    assert not same(narrow, wide, CPU, vector_group) and same(narrow, local(config(8)), CPU, vector_group)
    half = local(config(8, DataType.FP16))
    uvm = local(config(8), kernel=K.FUSED_UVM)
    for device in (CPU, GPU):
        assert not same(narrow, half, device) and same(narrow, uvm, device)
        assert not same(narrow, uvm, device, vector_group)


@settings(deadline=None)
@given(st.integers(1, 400))
def test_widths_are_padded_to_fours(dim: int) -> None:
    assert padded(dim) == next(width for width in range(dim, dim + 4) if width % 4 == 0)


@settings(deadline=None)
@given(st.integers(0, 300), st.sampled_from([4, 8, 32]))
def test_rows_on_the_wire_are_whole_and_carry_their_scale(count: int, row: int) -> None:
    rows = sum(1 for start in range(0, count, row))
    assert fp8_rows(row).size(count) == rows * (row + 4) and int8_rows(row).size(count) == rows * (row + 8)
    assert fp8_rows(row).sizes([count, 0]) == [rows * (row + 4), 0]
    plain = NumberFormat("x", 2)
    assert plain.size(count) == count and plain.sizes([count, 3]) == [count, 3]
    assert (fp8_rows(row).mean_bytes, int8_rows(row).mean_bytes) == (1 + 4 / row, 1 + 8 / row)
    assert {name: kind.mean_bytes for name, kind in FORMATS.items()} == {
        "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1.125, "int8": 1.25
    }  # fmt: skip


@pytest.mark.parametrize("row", [-4, 0, 2, 3, 5, 30])
def test_rows_that_no_operator_has_are_refused(row: int) -> None:
    for make in (fp8_rows, int8_rows):
        with pytest.raises(ValueError, match=f"row={row}: the elements that share a scale must be a multiple of 4"):
            make(row)


def test_codecs_scale_what_is_half_as_wide() -> None:
    assert get_qcomm_codecs_registry(QCommsConfig()) is None
    for kind, scaled in [(CommType.FP16, True), (CommType.BF16, True), (CommType.FP8, False), (CommType.INT8, False)]:
        given = QCommsConfig(kind, kind, forward_loss_scale=2.0, backward_loss_scale=8.0)
        registry = get_qcomm_codecs_registry(given, ["a", "b"])
        assert registry is not None and list(registry) == ["a", "b"]
        codec = registry["a"]
        assert (codec.forward_scale, codec.backward_scale) == ((2.0, 8.0) if scaled else (1.0, 1.0))
    one_way = get_qcomm_codecs_registry(QCommsConfig(backward_precision=CommType.FP8, fp8_quantize_dim=8))
    assert one_way is not None and len(one_way) == 3
    codec = one_way["POOLED_EMBEDDINGS_ALL_TO_ALL"]
    assert (codec.forward.name, codec.backward.name, codec.backward.row) == ("fp32", "fp8_wide_rows", 8)
    for flat, name in [(False, "fp8_wide"), (True, "fp8")]:
        registry = get_qcomm_codecs_registry(QCommsConfig(backward_precision=CommType.FP8, fp8_bwd_uses_143=flat))
        assert registry is not None and {one.backward.name for one in registry.values()} == {name}
    own = QCommsConfig(CommType.FP8, CommType.FP8, fp8_quantize_dim=8, fp8_quantize_dim_bwd=16)
    assert own.fp8_quantize_dim_bwd == 16
    for wrong, message in (
        (QCommsConfig(CommType.MX4), "MX4 is not supported"),
        (QCommsConfig(output_dtype=CommType.FP16), "output_dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            get_qcomm_codecs_registry(wrong)


def lookups_of(batch: int, lookups: int, weighted: bool) -> Lookups:
    lengths = torch.randint(0, 4, (lookups * batch,), generator=torch.Generator().manual_seed(batch))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.arange(int(lengths.sum())) % 3
    return Lookups(ids, offsets, ids / 2.0 if weighted else None)


@pytest.mark.parametrize("batch", [1, 3])
def test_tables_one_below_the_other_are_one(batch: int) -> None:
    tables, order = [local(config(8, rows=rows)) for rows in (3, 4, 5)], [0, 0, 1, 2]
    stack, given = StackedTables(tables, order, CPU), lookups_of(batch, 4, weighted=False)
    inner = FusedVectorKernel(tables, order, CPU)._inner.tables[0]
    assert (stack.num_rows, inner.rows.size, inner.config.num_embeddings) == (12, 12, 12)
    bags = [given.ids[a:b] for a, b in zip(given.offsets, given.offsets[1:], strict=False)]
    expected = [int(one) + [0, 0, 3, 7][bag // batch] for bag, ids in enumerate(bags) for one in ids]
    assert stack.ids(given).tolist() == expected
    assert [len(rows) for rows in stack.split(torch.arange(12))] == [3, 4, 5]
    alone = StackedTables([tables[0]], [0, 0], CPU)
    assert FusedVectorKernel(tables[:1], [0, 0], CPU)._inner.tables[0] is tables[0] and alone.ids(given) is given.ids


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_rounding_keeps_the_mean(dtype: torch.dtype, step: float) -> None:
    """A quarter of the way from 1 to the next number: a quarter of the draws goes up."""
    drawn = rounded(torch.full((40_000,), 1 + step / 4), dtype, seed=1)
    assert set(drawn.tolist()) == {1.0, 1 + step}
    assert float((drawn > 1).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(drawn, rounded(torch.full((40_000,), 1 + step / 4), dtype, seed=1))
    exact = torch.tensor([0.0, 1.0, -2.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(exact, dtype, 0).float(), exact)
    assert rounded(exact, torch.float32, 0) is exact


def test_helpers_of_scripts() -> None:
    assert none_throws(0) == 0
    with pytest.raises(AssertionError, match="no such"):
        none_throws(None, "no such")
    assert [append_prefix(*pair) for pair in [("a", "b"), ("", "b"), ("a", ""), ("", "")]] == ["a.b", "b", "a", ""]
    state = {"a.b": 1, "a.c.d": 2, "ab.c": 3}
    assert filter_state_dict(state, "a") == {"b": 1, "c.d": 2}
    add_prefix_to_state_dict(state, "x.")
    assert state == {"x.a.b": 1, "x.a.c.d": 2, "x.ab.c": 3}
    assert merge_fused_params({"a": 1, "learning_rate": 1}, {"lr": 2}) == {"a": 1, "learning_rate": 2}
    assert merge_fused_params(None, None) == {}
