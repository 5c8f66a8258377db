"""Number formats on the wire: what they cost, what they lose, and who counts them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from rayrec.distributed import (
    BF16,
    FP8,
    FP8_WIDE,
    FP16,
    FP32,
    Codec,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    NumberFormat,
    ShardingEnv,
    ShardingType,
    comm,
    fp8_rows,
    int8_rows,
)
from rayrec.distributed.kernel.number_formats import decode, encode, message_dtype
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

KINDS = [FP32, FP16, BF16, FP8, FP8_WIDE, fp8_rows(), fp8_rows(8), fp8_rows(16, wide=True), int8_rows(), int8_rows(4)]
WORST = {"fp32": 0.0, "fp16": 5e-4, "bf16": 4e-3, "fp8": 0.07, "fp8_wide": 0.13, "fp8_rows": 0.07, "int8": 4e-3}
WORST["fp8_wide_rows"] = 0.13
TABLE = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=12, feature_names=["f"])
BATCH = 5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{kind.row}")
@pytest.mark.parametrize("sizes", [[64, 32], [5, 0, 33, 1], [0, 0]], ids=str)
def test_a_message_is_as_long_as_it_says_and_comes_back(kind: NumberFormat, sizes: list[int]) -> None:
    numbers = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(1)) * 1.7 - 0.85
    message = encode(kind, numbers, sizes)
    assert message.dtype == message_dtype(kind) and len(message) == sum(kind.size(size) for size in sizes)
    found = decode(kind, message, sizes)
    assert found.dtype == torch.float32 and found.shape == numbers.shape
    if len(numbers):
        error = (found - numbers).abs()
        assert float(error.max()) <= WORST[kind.name] and (kind is FP32 or float(error.max()) > 0)


class _Float32(TorchFunctionMode):
    """Counts results of 32 bits."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and result.dtype == torch.float32 and result is not args[0]
        return result


@given(st.lists(st.floats(width=32), max_size=30))
def test_half_precision_has_the_bits_of_clamped_numbers_without_a_float32_copy(drawn: list[float]) -> None:
    numbers = torch.tensor([*drawn, 65504.0, 65519.9, 65520.0, -1e30, math.inf, math.nan])
    wanted = numbers.clamp(-65504.0, 65504.0).half()
    with _Float32() as results:
        message = encode(FP16, numbers, [len(numbers)])
    assert torch.equal(message.view(torch.int16), wanted.view(torch.int16))
    assert not results.count


def test_large_numbers_are_cut_where_nothing_scales_them() -> None:
    numbers = torch.tensor([1e6, -1e6, 3.0, 0.0])
    assert decode(FP16, encode(FP16, numbers, [4]), [4]).tolist() == [65504.0, -65504.0, 3.0, 0.0]
    assert decode(FP8, encode(FP8, numbers, [4]), [4]).tolist() == [0.9375, -0.9375, 0.9375, 0.0]
    scaled = decode(fp8_rows(4), encode(fp8_rows(4), numbers, [4]), [4])
    assert scaled[:2].tolist() == [1e6, -1e6]


def sent(group: dist.ProcessGroup, codec: Codec) -> int:
    """Bytes that a rank sends in a step whose table lies on rank 1."""
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD}, codec=codec)
    plan = {"t": cut(TABLE, ShardingType.TABLE_WISE, [1])}
    sharded = sharder.shard(EmbeddingBagCollection([TABLE]), plan, ShardingEnv.from_process_group(group), DEVICE)
    kjt = KeyedJaggedTensor(["f"], torch.arange(BATCH), lengths=torch.ones(BATCH, dtype=torch.int64))
    with comm.count_bytes() as counted:
        sharded(kjt).wait().values().sum().backward()
    return counted["all_to_all"]


@pytest.mark.parametrize(("forward", "backward"), [(FP16, BF16), (int8_rows(), fp8_rows()), (FP8, FP8_WIDE)])
def test_fewer_bytes_travel(forward: NumberFormat, backward: NumberFormat) -> None:
    """Rank 1 sends rank 0 its vectors, and rank 0 their gradients; ids are as before."""
    numbers = BATCH * TABLE.embedding_dim
    whole, less = on_ranks(2, sent, Codec()), on_ranks(2, sent, Codec(forward, backward))
    own_bytes = [
        kind.size(numbers) * torch.empty(0, dtype=message_dtype(kind)).element_size() for kind in (backward, forward)
    ]
    assert [a - b for a, b in zip(whole, less, strict=True)] == [4 * numbers - size for size in own_bytes]


@given(st.integers(0, 300), st.sampled_from([4, 8, 32]))
def test_rows_on_the_wire_are_whole_and_carry_their_scale(count: int, row: int) -> None:
    rows = sum(1 for start in range(0, count, row))
    assert fp8_rows(row).size(count) == rows * (row + 4) and int8_rows(row).size(count) == rows * (row + 8)
    assert fp8_rows(row).sizes([count, 0]) == [rows * (row + 4), 0]
    plain = NumberFormat("x", 2)
    assert plain.size(count) == count and plain.sizes([count, 3]) == [count, 3]
    assert (fp8_rows(row).mean_bytes, int8_rows(row).mean_bytes) == (1 + 4 / row, 1 + 8 / row)


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
