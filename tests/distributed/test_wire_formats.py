"""Number formats on the wire: what they cost, what they lose, and who counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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
from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.cost.seconds import shard_cost
from rayrec.distributed.planner.tables.from_model import find_tables, planner_tables
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
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


def test_large_numbers_are_cut_where_nothing_scales_them() -> None:
    numbers = torch.tensor([1e6, -1e6, 3.0, 0.0])
    assert decode(FP16, encode(FP16, numbers, [4]), [4]).tolist() == [65504.0, -65504.0, 3.0, 0.0]
    assert decode(FP8, encode(FP8, numbers, [4]), [4]).tolist() == [0.9375, -0.9375, 0.9375, 0.0]
    scaled = decode(fp8_rows(4), encode(fp8_rows(4), numbers, [4]), [4])
    assert scaled[:2].tolist() == [1e6, -1e6]


def test_a_row_that_shares_a_scale_is_a_multiple_of_four() -> None:
    for row in (0, 2, 6):
        with pytest.raises(ValueError, match="multiple of 4"):
            int8_rows(row)


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


def costs(codec: Codec | None) -> Any:
    topology = Topology(4, "cpu")
    sharder: Any = EmbeddingBagCollectionSharder(codec=codec)
    found = find_tables(EmbeddingBagCollection([TABLE]), [sharder], "cpu")
    (table,) = planner_tables(found, topology, None, 64)
    return shard_cost(table, "table_wise", "fused", (table.rows, table.dim), 2, topology)


def test_the_planner_counts_what_travels() -> None:
    whole, less = costs(None), costs(Codec(int8_rows(), FP16))
    assert less.output_intra == pytest.approx(whole.output_intra * (32 + 8) / 32 / 4)
    assert less.output_inter == pytest.approx(whole.output_inter * (32 + 8) / 32 / 4)
    assert less.gradient_inter == pytest.approx(whole.gradient_inter / 2)
    assert (less.lookup, less.backward, less.input_inter) == (whole.lookup, whole.backward, whole.input_inter)
