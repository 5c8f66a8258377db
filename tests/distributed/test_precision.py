"""Small gradients in half precision, on the wire and under autocast: kept or refused, never lost without a word."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import FP16, Codec, EmbeddingBagCollectionSharder, EmbOptimType, ShardingEnv, ShardingType
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

TABLE = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
KJT = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def shard(group: dist.ProcessGroup, codec: Codec | None = None, kernel: str = "fused") -> Any:
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1e9}, codec=codec)
    plan = {"t": cut(TABLE, ShardingType.TABLE_WISE, [1], kernel)}
    return sharder.shard(EmbeddingBagCollection([TABLE]), plan, ShardingEnv.from_process_group(group), DEVICE)


def moved(group: dist.ProcessGroup, codec: Codec) -> float:
    """How far a gradient of 1e-9 moves a weight."""
    sharded = shard(group, codec)
    held = sharded.tables()["t"].local
    before = [item.weight.clone() for item in held]
    (sharded(KJT).wait().values().sum() * 1e-9).backward()
    return sum((old - item.weight)[1, 0].item() for old, item in zip(before, held, strict=True))


def test_a_scale_keeps_small_gradients_on_the_wire() -> None:
    found = [on_ranks(2, moved, codec)[1] for codec in (Codec(), Codec(backward=FP16), Codec(FP16, FP16, 2.0**20))]
    assert found[0] == pytest.approx(1.0, rel=1e-4)
    assert found[1] == 0.0
    assert found[2] == pytest.approx(1.0, rel=1e-2)


def under_autocast(group: dist.ProcessGroup, dtype: torch.dtype, kernel: str, train: bool) -> str:
    sharded = shard(group, kernel=kernel)
    try:
        with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(train):
            sharded(KJT).wait()
    except ValueError as error:
        return str(error)
    return ""


def test_scaled_gradients_are_refused_where_the_update_is_inside_backward() -> None:
    assert all("GradScaler" in text for text in on_ranks(2, under_autocast, torch.float16, "fused", True))
    for dtype, kernel, train in [(torch.bfloat16, "fused", True), (torch.float16, "dense", True)]:
        assert on_ranks(2, under_autocast, dtype, kernel, train) == ["", ""]
    assert on_ranks(2, under_autocast, torch.float16, "fused", False) == ["", ""]


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL])
def test_a_table_of_16_bits_that_loses_small_updates_is_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, kernel: str, data_type: DataType, rounding: bool, kind: ShardingType
) -> None:
    table = EmbeddingBagConfig(name="t16", num_embeddings=4, embedding_dim=4, feature_names=["f"], data_type=data_type)
    plan = {"t16": cut(table, kind, [0], kernel)}
    sharder = EmbeddingBagCollectionSharder({"stochastic_rounding": rounding})
    with caplog.at_level(logging.WARNING):
        sharder.shard(EmbeddingBagCollection([table]), plan, ShardingEnv.from_local(1, 0), torch.device("cpu"))
    lost = kernel == "fused" and data_type is not DataType.FP32 and not rounding
    assert len(caplog.messages) == lost
    if lost:
        assert f"tables ['t16'] hold {data_type.value} weights" in caplog.text
        assert "stochastic_rounding: true" in caplog.text
