"""Quantized tables over several ranks give what they give on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from rayrec.inference import quantize_inference_model, shard_quant_model
from tests.ranks import Ranks


def collection(weighted: bool) -> EmbeddingBagCollection:
    def table(name: str, rows: int, features: list[str], pooling: PoolingType = PoolingType.SUM) -> Any:
        return EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=features, pooling=pooling
        )

    tables = [table("a", 30, ["x", "y"]), table("b", 9, ["z"], PoolingType.MEAN), table("c", 50, ["x"])]
    return EmbeddingBagCollection(tables, is_weighted=weighted, seed=5)


def batch_of(size: int, seed: int, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    count = int(lengths.sum())
    weights = torch.rand(count, generator=generator) if weighted else None
    ids = torch.randint(9, (count,), generator=generator)
    return KeyedJaggedTensor(["z", "x", "y"], ids, weights, lengths=lengths, stride=size)


def on_rank(group: Any, weighted: bool, ranks: dict[str, int] | None) -> int:
    formats = {"a": "int8", "b": "fp16", "c": "int4"}
    whole = quantize_inference_model(collection(weighted), formats)
    sharded = shard_quant_model(quantize_inference_model(collection(weighted), formats), group, ranks)
    for step, sizes in enumerate(([3, 5, 2], [0, 4, 1], [1, 0, 0])):
        batch = batch_of(sizes[group.rank()], 10 * step + group.rank(), weighted)
        found, expected = sharded(batch), whole(batch)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=0)
    return sum(buffer.numel() for buffer in sharded.buffers())


def test_ranks_keep_a_part_of_the_tables_and_score_to_the_last_bit() -> None:
    pool = Ranks(2)
    try:
        held = pool.run(on_rank, False, None)
        assert all(held) and sum(held) < 2 * max(held) + 512
        pool.run(on_rank, True, {"a": 1, "b": 1, "c": 1})
    finally:
        pool.close()


def test_a_table_without_a_rank_is_named() -> None:
    with pytest.raises(ValueError, match="table 'b': its rank"):
        shard_quant_model(quantize_inference_model(collection(False)), None, {"a": 0, "c": 0})
    with pytest.raises(ValueError, match="no quantized"):
        shard_quant_model(collection(False), None)
