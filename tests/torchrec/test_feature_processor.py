"""Weights learned for each position of a list, alone and before a collection, also a sharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.modules.feature_processor import PositionWeightedProcessor
from rayrec.torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt, join, targets
from tests.ranks import on_ranks

POSITIONS = {"a": 3, "c": 2}
LR = 0.1


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="u", num_embeddings=11, embedding_dim=8, feature_names=["c"], pooling=PoolingType.MEAN),
    ]


def model() -> FeatureProcessedEmbeddingBagCollection:
    processor = PositionWeightedProcessor(POSITIONS)
    with torch.no_grad():
        for place, weight in enumerate(processor.position_weights.values()):
            weight.copy_(torch.linspace(0.5 + place, 1.5, weight.numel()))
    return FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables(), is_weighted=True, seed=3), processor)


def weights_by_hand(processor: PositionWeightedProcessor, kjt: KeyedJaggedTensor) -> list[float]:
    given = kjt.weights_or_none()
    out, at = [], 0
    for key in kjt.keys():
        for length in kjt[key].lengths().tolist():
            for place in range(length):
                mine = processor.position_weights[key] if key in POSITIONS else torch.ones(1)
                weight = mine[min(place, mine.numel() - 1)].item()
                out.append(weight * (1.0 if given is None else given[at].item()))
                at += 1
    return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_weights_follow_the_positions(batch: int, weighted: bool) -> None:
    processor = model()._feature_processors
    kjt = draw_kjt(torch.Generator().manual_seed(batch), tables(), batch, 6, weighted)
    out = processor(kjt)
    assert out.weights().tolist() == pytest.approx(weights_by_hand(processor, kjt))
    assert out.keys() == kjt.keys() and out.stride() == batch
    assert torch.equal(out.values(), kjt.values()) and torch.equal(out.lengths(), kjt.lengths())


def test_batch_sizes_may_vary_by_key() -> None:
    processor = model()._feature_processors
    kjt = KeyedJaggedTensor(
        ["c", "a"],
        torch.arange(7),
        lengths=torch.tensor([2, 0, 1, 4]),
        stride_per_key_per_rank=[[1], [3]],
    )
    assert processor(kjt).weights().tolist() == pytest.approx(weights_by_hand(processor, kjt))


def test_gradients_are_those_of_the_plain_formula() -> None:
    ours = model()
    kjt = draw_kjt(torch.Generator().manual_seed(7), tables(), 4, 5)
    targets(ours(kjt)).mean().backward()
    processor, ebc = ours._feature_processors, ours._embedding_bag_collection
    found = {name: weight.grad.clone() for name, weight in processor.position_weights.items()}
    ours.zero_grad()
    blocks = []
    for config in tables():
        for feature in config.feature_names:
            rows = []
            for ids in kjt[feature].to_dense():
                mine = processor.position_weights[feature] if feature in POSITIONS else torch.ones(1)
                places = torch.arange(len(ids)).clamp(max=mine.numel() - 1)
                bag = (ebc.embedding_bags[config.name].weight[ids] * mine[places][:, None]).sum(0)
                rows.append(bag / max(1, len(ids)) if config.pooling is PoolingType.MEAN else bag)
            blocks.append(torch.stack(rows))
    values = torch.cat(blocks, dim=1)
    factors = torch.linspace(-1, 1, values.shape[1])
    (((values * factors).sum(1) - 0.3).square() + values.sum(1)).mean().backward()
    for name, weight in processor.position_weights.items():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-5, rtol=1e-4)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables()), PositionWeightedProcessor({"a": 1}))
    with pytest.raises(ValueError, match="lacks feature 'a'"):
        PositionWeightedProcessor({"a": 2})(
            KeyedJaggedTensor(["b"], torch.ones(0), lengths=torch.zeros(1, dtype=torch.int64))
        )
    with pytest.raises(ValueError, match="feature 'a': max_feature_lengths=0"):
        PositionWeightedProcessor({"a": 0})
    with pytest.raises(ValueError, match="name at least one feature"):
        PositionWeightedProcessor({})


def batches(world: int) -> list[list[KeyedJaggedTensor]]:
    generator = torch.Generator().manual_seed(9)
    return [[draw_kjt(generator, tables(), 3 + rank, 4) for rank in range(world)] for _ in range(3)]


def train_alone(world: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=LR)
    outputs = []
    for parts in batches(world):
        optimizer.zero_grad()
        kt = ours(join(parts))
        outputs.append(kt.values().detach())
        targets(kt).mean().backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in ours._feature_processors.position_weights.items()}, outputs


def devices_of_backward(loss: torch.Tensor) -> set[str]:
    """Where the gradients are that the graph's nodes take."""
    nodes, found = {loss.grad_fn}, set[str]()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        assert node is not None
        found |= {each.device.type for each in node._input_metadata}
        new = {following for following, _ in node.next_functions if following is not None} - nodes
        nodes |= new
        ahead += new
    return found


def train_on_rank(
    group: dist.ProcessGroup, plan: ModuleSharding, device: torch.device = DEVICE
) -> tuple[dict[str, torch.Tensor], Any]:
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR})
    dmp = DistributedModelParallel(
        model(),
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=ShardingPlan({"_embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    optimizer = torch.optim.SGD(dmp.dense_parameters().values(), lr=LR)
    outputs = []
    for parts in batches(group.size()):
        optimizer.zero_grad()
        kt = dmp(parts[group.rank()].to(device)).wait()
        outputs.append(kt.values().detach())
        total = sum(part.stride() for part in parts)
        loss = targets(kt).sum() * group.size() / total
        # nodes of another device would run in a thread of their own, and collectives of ranks in any order
        assert devices_of_backward(loss) == {device.type}
        loss.backward()
        optimizer.step()
    prefix = "_feature_processors.position_weights."
    return {name.removeprefix(prefix): weight.detach() for name, weight in dmp.dense_parameters().items()}, outputs


def plans(world: int) -> dict[str, ModuleSharding]:
    T, everyone = ShardingType, list(range(world))
    kinds: dict[str, list[tuple[ShardingType, list[int]]]] = {
        "table_wise": [(T.TABLE_WISE, [0]), (T.TABLE_WISE, [world - 1])],
        "one_rank_has_none": [(T.TABLE_WISE, [0]), (T.TABLE_WISE, [0])],
        "row_wise": [(T.ROW_WISE, everyone)] * 2,
        "column_wise": [(T.COLUMN_WISE, everyone)] * 2,
        "data_parallel": [(T.DATA_PARALLEL, everyone)] * 2,
        "mixed": [(T.DATA_PARALLEL, everyone), (T.ROW_WISE, everyone)],
    }
    return {
        name: {t.name: cut(t, kind, ranks) for t, (kind, ranks) in zip(tables(), chosen, strict=True)}
        for name, chosen in kinds.items()
    }


def check_against_one_process(name: str, world: int) -> None:
    expected, outputs = train_alone(world)
    answers = on_ranks(world, train_on_rank, plans(world)[name])
    for place, whole in enumerate(outputs):
        torch.testing.assert_close(torch.cat([seen[place] for _, seen in answers]), whole, atol=1e-5, rtol=1e-4)
    for weights, _ in answers:
        for feature, weight in weights.items():
            torch.testing.assert_close(weight, expected[feature], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", list(plans(1)))
def test_position_weights_train_before_a_sharded_collection(name: str) -> None:
    check_against_one_process(name, world=1)


@pytest.mark.parametrize("name", list(plans(2)))
def test_position_weights_train_over_two_ranks(name: str) -> None:
    check_against_one_process(name, world=2)
