"""Tables without `requires_grad` keep their rows under every plan, and everything else is as in a plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.planner.tables.from_model import find_tables
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.optim import apply_optimizer_in_backward
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.torchrec.distributed import model_parallel as torchrec_parallel
from tests.distributed.oracle import ADAGRAD, SGD, cut, draw_kjt, join
from tests.ranks import on_ranks

CPU, T = torch.device("cpu"), ShardingType
FROZEN = {"a", "c"}
ADAM = {"optimizer": "adam", "learning_rate": 0.1, "weight_decay": 0.1}
PLANS: dict[str, list[tuple[ShardingType, list[int], str]]] = {
    "table": [(T.TABLE_WISE, [0], "fused"), (T.TABLE_WISE, [1], "fused"), (T.TABLE_WISE, [1], "fused")],
    # Rank 0 has frozen tables only, and takes part in every exchange.
    "apart": [(T.TABLE_WISE, [0], "fused"), (T.TABLE_WISE, [1], "fused"), (T.TABLE_WISE, [0], "fused")],
    "row": [(T.ROW_WISE, [0, 1], "fused")] * 3,
    "column": [(T.COLUMN_WISE, [0, 1], "fused")] * 3,
    "copies": [(T.DATA_PARALLEL, [0, 1], "fused")] * 3,
    "dense": [(T.ROW_WISE, [0, 1], "dense"), (T.TABLE_WISE, [0], "fused"), (T.DATA_PARALLEL, [0, 1], "dense")],
}


def tables(sequence: bool, data_type: DataType = DataType.FP32) -> list[Any]:
    kind = EmbeddingConfig if sequence else EmbeddingBagConfig
    return [
        kind(name=name, num_embeddings=9 + n, embedding_dim=8, feature_names=[f"f{n}"], data_type=data_type)
        for n, name in enumerate("abc")
    ]


class Model(nn.Module):
    def __init__(self, sequence: bool, data_type: DataType, frozen: bool = True) -> None:
        super().__init__()
        make: Any = EmbeddingCollection if sequence else EmbeddingBagCollection
        self.tables = make(tables(sequence, data_type), seed=1)
        for name in FROZEN if frozen else ():
            getattr(self.tables, "embeddings" if sequence else "embedding_bags")[name].requires_grad_(False)
        torch.manual_seed(1)
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.tables(features)
        outputs = [found[f"f{n}"] for n in range(3)]
        vectors = [each.values() if isinstance(each, JaggedTensor) else each for each in outputs]
        return torch.cat([self.over(each) for each in vectors]).square().sum()


def batches(rank: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [draw_kjt(generator, tables(False), 4, 3) for _ in range(3)]


def train(
    group: dist.ProcessGroup, plan: list[tuple[ShardingType, list[int], str]], sequence: bool, optimizer: Any
) -> dict[str, torch.Tensor]:
    """Weights after some steps, from all ranks' shards."""
    model = Model(sequence, DataType.FP32)
    sharding: dict[str, ParameterSharding] = {
        t.name: cut(t, kind, ranks, kernel) for t, (kind, ranks, kernel) in zip(tables(sequence), plan, strict=True)
    }
    sharders: list[Any] = [EmbeddingBagCollectionSharder(optimizer), EmbeddingCollectionSharder(optimizer)]
    env = ShardingEnv.from_process_group(group)
    dmp = DistributedModelParallel(model, env, CPU, ShardingPlan({"tables": sharding}), sharders)
    dense = torch.optim.SGD(dmp.dense_parameters().values(), lr=0.1)
    names = list(dmp.fused_optimizer.state_dict()["state"])
    assert not any(f".{name}." in text for name in FROZEN for text in [*dmp.dense_parameters(), *names])
    for features in batches(group.rank()):
        dense.zero_grad()
        (dmp(features) * group.size()).backward()
        dense.step()
    weights = {name: p.detach() for name, p in dmp.dense_parameters().items()}
    for name, table in dmp.tables().items():
        whole = torch.zeros(table.config.num_embeddings, table.config.embedding_dim)
        for item in table.local:
            rows, cols = item.shard.rows, item.shard.cols
            whole[rows.start : rows.stop, cols.start : cols.stop] = item.weight
        if not table.replicated:
            dist.all_reduce(whole, group=group)
        weights[f"{name}.weight"] = whole
    return weights


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("plan", list(PLANS))
def test_frozen_tables_stay_and_all_others_train_as_in_a_plain_process(plan: str, sequence: bool) -> None:
    for fused in (SGD, ADAGRAD):
        plain = Model(sequence, DataType.FP32)
        before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
        is_sgd = fused is SGD
        trained = [p for name, p in plain.named_parameters() if p.requires_grad and "over" not in name]
        of_tables = torch.optim.SGD(trained, 0.1) if is_sgd else torch.optim.Adagrad(trained, 0.1, eps=0.01)
        dense = torch.optim.SGD(plain.over.parameters(), 0.1)
        for parts in zip(batches(0), batches(1), strict=True):
            of_tables.zero_grad()
            dense.zero_grad()
            plain(join(parts)).backward()
            of_tables.step()
            dense.step()
        for weights in on_ranks(2, train, PLANS[plan], sequence, fused):
            for name, expected in plain.named_parameters():
                torch.testing.assert_close(weights[name], expected.detach(), atol=1e-5, rtol=1e-5)
                if not expected.requires_grad:
                    assert torch.equal(weights[name], before[name])


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
@pytest.mark.parametrize("kind, kernel", [(T.TABLE_WISE, "fused"), (T.DATA_PARALLEL, "fused"), (T.TABLE_WISE, "dense")])
def test_weights_of_ids_are_trained_through_frozen_tables(kind: ShardingType, kernel: str, data_type: DataType) -> None:
    ebc = EmbeddingBagCollection(tables(False, data_type), is_weighted=True, seed=1)
    ebc.requires_grad_(False)
    before = {name: weight.clone() for name, weight in ebc.state_dict().items()}
    grads = []
    plan = {t.name: cut(t, kind, [0], kernel) for t in tables(False, data_type)}
    sharded = EmbeddingBagCollectionSharder(ADAM).shard(ebc, plan, ShardingEnv.from_local(1, 0), CPU)
    for module in (ebc, sharded):
        batch = draw_kjt(torch.Generator().manual_seed(1), tables(False), 4, 3, weighted=True)
        weights = batch.weights().clone().requires_grad_()
        module(batch.with_weights(weights)).values().square().sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert grads[0] is not None and grads[0].abs().sum() > 0
    for name, weight in sharded.state_dict().items():
        assert torch.equal(weight, before[name])


def error_after_a_change(group: dist.ProcessGroup, frozen: bool) -> str:
    model = Model(False, DataType.FP32, frozen)
    plan = {t.name: cut(t, T.TABLE_WISE, [1]) for t in tables(False)}
    env = ShardingEnv.from_process_group(group)
    dmp = DistributedModelParallel(
        model, env, CPU, ShardingPlan({"tables": plan}), [EmbeddingBagCollectionSharder(SGD)]
    )
    dmp.module.tables.embedding_bags["c"].requires_grad_(frozen)
    with torch.no_grad():
        dmp(batches(0)[0])
    try:
        dmp(batches(0)[0])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_after_sharding_is_refused_on_every_rank(frozen: bool) -> None:
    first, second = on_ranks(2, error_after_a_change, frozen)
    assert f"table 'c' was sharded with requires_grad={not frozen}, and it is {frozen} now" in second
    assert "rank 1 cannot process its batch" in first


def test_the_planner_counts_no_optimizer_state_for_a_frozen_table() -> None:
    sizes = []
    for frozen in (False, True):
        model = Model(False, DataType.FP32, frozen)
        found = find_tables(model, [EmbeddingBagCollectionSharder(ADAM)], "cpu")
        sizes.append([table.state[1] for table in found])
    assert sizes == [[8, 8, 8], [0, 8, 0]]


@pytest.mark.parametrize("plan", list(PLANS))
def test_tables_without_an_optimizer_are_not_trained_and_the_first_step_says_so(
    plan: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(False, DataType.FP32, frozen=False)
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.embedding_bags["b"].parameters(), {"lr": 0.1})
    kernels = [kernel for _, _, kernel in PLANS[plan]]
    kinds = [T.DATA_PARALLEL if kind is T.DATA_PARALLEL else T.TABLE_WISE for kind, _, _ in PLANS[plan]]
    sharding = {
        t.name: cut(t, kind, [0], kernel) for t, kind, kernel in zip(tables(False), kinds, kernels, strict=True)
    }
    dmp = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": sharding}))
    before = {name: weight.clone() for name, weight in dmp.state_dict().items()}
    with torch.no_grad():
        dmp(batches(0)[0])
    assert not caplog.messages
    for features in batches(0):
        dmp(features).backward()
    keys = {name: f"tables.embedding_bags.{name}.weight" for name in "abc"}
    assert [name for name, key in keys.items() if not torch.equal(before[key], dmp.state_dict()[key])] == ["b"]
    left = [name for name, kernel in zip("abc", kernels, strict=True) if name != "b" and kernel == "fused"]
    assert [f"tables {left} are not trained" in text for text in caplog.messages] == [True] * bool(left)


def test_programs_for_torchrec_have_its_default_optimizer() -> None:
    dmp = torchrec_parallel.DistributedModelParallel(Model(False, DataType.FP32, frozen=False), device=CPU)
    before = {name: weight.clone() for name, weight in dmp.state_dict().items()}
    dmp(batches(0)[0]).backward()
    assert [round(group["lr"], 6) for group in dmp.fused_optimizer.param_groups] == [0.01]
    for name, weight in dmp.state_dict().items():
        assert torch.equal(before[name], weight) == ("over" in name)
