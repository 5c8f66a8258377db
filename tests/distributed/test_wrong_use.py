"""Wrong use gets an error that names the thing, on every rank: never a hang or an index error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ParameterSharding,
    Shard,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Span,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut
from tests.ranks import PerRank, on_ranks


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="t1", num_embeddings=10, embedding_dim=8, feature_names=["f1"]),
        EmbeddingBagConfig(name="t2", num_embeddings=20, embedding_dim=8, feature_names=["f2"]),
    ]


def kjt(keys: list[str], ids: list[int], weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    lengths = torch.ones(len(ids), dtype=torch.int64)
    return KeyedJaggedTensor(keys, torch.tensor(ids), weights, lengths=lengths)


def other_lengths(cache: str, sizes: list[int]) -> KeyedJaggedTensor:
    """A batch with sizes of another batch."""
    lengths = torch.tensor([1, 0, 1, 2])
    return KeyedJaggedTensor(["f1", "f2"], torch.tensor([1, 2, 3, 4]), lengths=lengths, **{cache: sizes})  # type: ignore[arg-type]


def changed_lengths() -> KeyedJaggedTensor:
    """A batch whose lengths were overwritten after its sizes were computed."""
    batch = KeyedJaggedTensor(["f1", "f2"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1])).sync()
    batch.lengths().copy_(torch.tensor([1, 0, 1, 2]))
    return batch


def error_of_lookup(group: dist.ProcessGroup, plan: ModuleSharding, inputs: list[Any], weighted: bool) -> str:
    ebc = EmbeddingBagCollection(tables(), is_weighted=weighted)
    env = ShardingEnv.from_process_group(group)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env, torch.device("cpu"))
    try:
        sharded(inputs[group.rank()]).wait()
    except ValueError as error:
        return str(error)
    return "no error"


PLANS = {
    "tw": [(ShardingType.TABLE_WISE, [0]), (ShardingType.TABLE_WISE, [1])],
    "rw": [(ShardingType.ROW_WISE, [0, 1])] * 2,
    "dp": [(ShardingType.DATA_PARALLEL, [0, 1])] * 2,
}
GOOD = kjt(["f1", "f2"], [1, 2])


@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize(
    "bad, weighted, text",
    [
        (kjt(["f1", "f2"], [1, 20]), False, "feature 'f2': id 20 is outside the rows [0, 20) of table 't2'"),
        (kjt(["f1", "f2"], [-1, 2]), False, "feature 'f1': id -1 is outside the rows [0, 10) of table 't1'"),
        (kjt(["f1", "g"], [1, 2]), False, "no feature 'f2'"),
        (kjt(["f1", "f2"], [1, 2]), True, "the input has no weights"),
        (other_lengths("length_per_key", [2, 2]), False, "add up to [1, 3], but length_per_key is [2, 2]"),
        (
            other_lengths("offset_per_key", [0, 3, 4]),
            False,
            "offset_per_key is [0, 3, 4]: they belong to other lengths",
        ),
        (changed_lengths(), False, "add up to [1, 3], but length_per_key is [2, 2]"),
    ],
)
def test_a_bad_batch_on_one_rank_is_an_error_on_all(name: str, bad: Any, weighted: bool, text: str) -> None:
    plan = {t.name: cut(t, kind, ranks) for t, (kind, ranks) in zip(tables(), PLANS[name], strict=True)}
    good = kjt(["f1", "f2"], [1, 2], torch.ones(2)) if weighted else GOOD
    errors = on_ranks(2, error_of_lookup, plan, [good, bad], weighted)
    assert text in errors[1]
    assert "rank 1" in errors[0]


def shard(params: ModuleSharding, world: int = 2, fused: dict[str, Any] | None = None) -> None:
    ebc = EmbeddingBagCollection(tables(), device="meta")
    sharder = EmbeddingBagCollectionSharder(fused)
    sharder.shard(ebc, params, ShardingEnv.from_local(world, 0), torch.device("cpu"))


def whole_plan() -> ModuleSharding:
    return {t.name: cut(t, ShardingType.TABLE_WISE, [0]) for t in tables()}


def test_plans_that_do_not_fit_are_refused_by_name() -> None:
    plan = whole_plan()
    with pytest.raises(ValueError, match=r"table 't2'; plan again"):
        shard({"t1": plan["t1"]}, 1)
    far = {**plan, "t1": cut(tables()[0], ShardingType.TABLE_WISE, [3])}
    with pytest.raises(ValueError, match="table 't1': the plan uses rank 3, but there are 1 ranks"):
        shard(far, 1)
    half = Shard(table="t1", rows=Span(0, 5), cols=Span(0, 8), rank=0)
    holes = ParameterSharding(sharding_type="row_wise", compute_kernel="fused", shards=(half,))
    with pytest.raises(ValueError, match="table 't1': its shards do not cover 10 rows × 8 columns"):
        shard({**plan, "t1": holes}, 1)
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        shard(plan, 2)
    env = ShardingEnv.from_local(1, 0)
    ebc = EmbeddingBagCollection(tables(), device="meta")
    big = ShardingPlan({"": far})
    with pytest.raises(ValueError, match="the plan is for 4 ranks or more, but there are 1"):
        DistributedModelParallel(ebc, env=env, device=torch.device("cpu"), plan=big)
    with pytest.raises(ValueError, match="plan and model differ in module ''"):
        DistributedModelParallel(ebc, env=env, device=torch.device("cpu"), plan=ShardingPlan({}))


def test_wrong_optimizer_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'lr' is not a setting; there are .*learning_rate"):
        shard(whole_plan(), 1, {"lr": 0.1})
    with pytest.raises(ValueError, match="none"):
        shard(whole_plan(), 1, {"optimizer": EmbOptimType.NONE})


def test_a_table_that_no_kernel_can_hold_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="embedding_dim=0 must be at least 1"):
        EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=0, feature_names=["f"])
    with pytest.raises(ValueError, match="num_embeddings=0 must be at least 1"):
        EmbeddingBagConfig(name="t", num_embeddings=0, embedding_dim=8, feature_names=["f"])
    with pytest.raises(ValueError, match="'t1': every table needs a unique name"):
        EmbeddingBagCollection([tables()[0], tables()[0]])


class TwoCollections(nn.Module):
    """Two collections with tables of one name and one width; the order of their calls is an argument."""

    def __init__(self, names: list[str], second: int) -> None:
        super().__init__()
        wide = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f1"])
        more = tables()[1:] * (second > 1)
        made = {"a": EmbeddingBagCollection([wide], seed=1), "b": EmbeddingBagCollection([wide, *more], seed=2)}
        self.towers = nn.ModuleDict({name: made[name] for name in names})

    def forward(self, order: str, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([self.towers[name](features).values() for name in order], dim=1)


def error_of_order(group: dist.ProcessGroup, name: str, second: int, names: list[str], order: str) -> str:
    kind, ranks = PLANS[name][0]
    model = TwoCollections(names, second)
    plan = {
        f"towers.{path}": {t.name: cut(t, kind, ranks) for t in model.towers[path].embedding_bag_configs()}  # type: ignore[operator]
        for path in names
    }
    try:
        env = ShardingEnv.from_process_group(group)
        dmp = DistributedModelParallel(model, env, torch.device("cpu"), ShardingPlan(plan))
        dmp(order, kjt(["f1", "f2"], [group.rank() + 1, 2]))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("second", [1, 2])
@pytest.mark.parametrize("name", list(PLANS))
def test_collections_called_in_another_order_are_named_on_every_rank(name: str, second: int) -> None:
    errors = on_ranks(2, error_of_order, name, second, ["a", "b"], PerRank(["ab", "ba"]))
    assert "rank 1 calls another collection than rank 0, which calls collection 'towers.a'" in errors[0]
    assert "rank 0 calls another collection than rank 1, which calls collection 'towers.b'" in errors[1]
    assert on_ranks(2, error_of_order, name, second, ["a", "b"], "ba") == ["no error"] * 2


def test_collections_built_in_another_order_are_named_on_every_rank() -> None:
    for error in on_ranks(2, error_of_order, "tw", 1, PerRank([["a", "b"], ["b", "a"]]), "ab"):
        assert "['towers.a', 'towers.b'] on rank 0, but ['towers.b', 'towers.a'] on rank 1" in error


def error_of_sharding(group: dist.ProcessGroup, table: int) -> str:
    config = tables()[table]
    plan = {config.name: cut(config, ShardingType.ROW_WISE, [0, 1])}
    env = ShardingEnv.from_process_group(group)
    try:
        EmbeddingBagCollectionSharder().shard(EmbeddingBagCollection([config]), plan, env, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_shard_other_tables_are_named_on_every_rank() -> None:
    for error in on_ranks(2, error_of_sharding, PerRank([0, 1])):
        assert "rank 0 shards a collection of tables ['t1'], rank 1 one of tables ['t2']" in error
