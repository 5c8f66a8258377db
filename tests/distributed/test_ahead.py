"""Ids that are begun before `forward` asks for them: found by the very object, oldest first, each once."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv, ShardingType
from rayrec.distributed.ids.batch import NUMBER
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut

TABLES = [EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])]


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor([1]), lengths=torch.tensor([1]))


def collection(kind: ShardingType = ShardingType.TABLE_WISE) -> Any:
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    plan = {"t": cut(TABLES[0], kind, [0])}
    return sharder.shard(EmbeddingBagCollection(TABLES), plan, ShardingEnv.from_local(1, 0), torch.device("cpu"))


def number(pending: Any) -> int:
    """Batches are numbered in the order in which they are begun."""
    return pending.wait().received[0][NUMBER]


def test_what_was_begun_is_taken_once_the_oldest_first() -> None:
    ahead = collection().ids_ahead
    one, other = kjt(), kjt()
    for features in (one, other, one):
        ahead.begin(features)
    assert [number(ahead.take(features)) for features in (one, one, other)] == [1, 3, 2]
    assert number(ahead.take(one)) == 4  # nothing is left: begun now


def test_ids_begun_for_evaluation_are_not_trained_on_and_nothing_stays() -> None:
    for kind in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL):
        sharded, features = collection(kind), kjt()
        ahead = sharded.ids_ahead
        with torch.no_grad():
            ahead.begin(features)
        before = sharded(features).wait().values().sum().item()
        assert ahead._ahead == []
        sharded(features).wait().values().sum().backward()
        assert sharded(features).wait().values().sum().item() < before


def test_ids_begun_for_training_serve_an_evaluation() -> None:
    for kind in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL):
        sharded, features = collection(kind), kjt()
        begun = sharded.ids_ahead.begin(features)
        with torch.no_grad():
            taken = sharded.ids_ahead.take(features)
            out = sharded.output_dist(sharded.lookup(taken.wait())).wait().values()
        assert taken is begun and sharded.ids_ahead._ahead == [] and not out.requires_grad


def test_what_is_dropped_was_not_taken_before() -> None:
    ahead = collection().ids_ahead
    first, second, third = (ahead.begin(kjt()) for _ in range(3))
    ahead.take(first.features)
    assert [ahead.drop(begun) for begun in (first, second, second)] == [False, True, False]
    ahead.clear()
    assert not ahead.drop(third)
