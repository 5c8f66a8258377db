"""2D parallelism: replicated sharding groups are one training where they meet every step, and made alike where not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingComputeKernel,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    comm,
)
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.kernel import RULES, OptimizerSpec, check_trainable
from rayrec.distributed.replicas.averaging import average
from rayrec.distributed.replicas.gradients import Replicas
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.distributed import model_parallel as by_torchrec
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.distributed.test_model_parallel import batches, model_and_optimizer, tables
from tests.ranks import PerRank, on_ranks

T = ShardingType
WORLD, GROUP = 4, 2
Weights = dict[str, torch.Tensor]


def mixed(world: int, kernel: str = "fused", columns: bool = True) -> ModuleSharding:
    everyone = list(range(world))
    second = T.COLUMN_WISE if columns else T.ROW_WISE
    kinds = [(T.ROW_WISE, everyone), (second, everyone), (T.DATA_PARALLEL, everyone), (T.TABLE_WISE, [0])]
    return {t.name: cut(t, kind, ranks, kernel) for t, (kind, ranks) in zip(tables(), kinds, strict=True)}


def whole_tables(model: DistributedModelParallel) -> Weights:
    """This rank's part of every table and state in a tensor of the whole, NaN elsewhere."""
    out = {}
    for name, table in model.tables().items():
        for item in table.local:
            shape = (table.config.num_embeddings, table.config.embedding_dim)
            rows, cols = item.shard.rows, item.shard.cols
            for key, value in {"weight": item.weight, **item.state}.items():
                full = out.setdefault(f"{name}/{key}", torch.full(shape, torch.nan))
                part = value[:, None].expand(-1, cols.size) if value.dim() == 1 else value
                full[rows.start : rows.stop, cols.start : cols.stop] = part.float()
    return out


def train(model: DistributedModelParallel, group: dist.ProcessGroup, steps: int = 4) -> tuple[list[float], Weights]:
    _, make = model_and_optimizer()
    dense = make(model.dense_parameters().values())
    losses = []
    for parts in batches(group.size(), steps):
        loss, _ = model(parts[group.rank()])
        dense.zero_grad()
        loss.backward()
        dense.step()
        if isinstance(model, DMPCollection):
            model.after_step()
        losses.append(loss.item())
    others = {name: p.detach().clone() for name, p in model.other_parameters().items()}
    return losses, {**whole_tables(model), **others}


def one_group(group: dist.ProcessGroup, fused: Any, plan: dict[str, Any]) -> Any:
    model = DistributedModelParallel(
        model_and_optimizer()[0],
        env=ShardingEnv.from_process_group(group),
        device=DEVICE,
        plan=ShardingPlan({"embedding_bags": mixed(group.size(), **plan)}),
        sharders=[EmbeddingBagCollectionSharder(fused)],
    )
    return train(model, group)


def collection(group: dist.ProcessGroup, fused: Any, plan: dict[str, Any], **settings: Any) -> DMPCollection:
    given: dict[str, Any] = {"world_size": group.size(), "sharding_group_size": GROUP} | settings
    return DMPCollection(
        model_and_optimizer()[0],
        DEVICE,
        ShardingPlan({"embedding_bags": mixed(given["sharding_group_size"], **plan)}),
        global_pg=group,
        sharders=[EmbeddingBagCollectionSharder(fused)],
        **given,
    )


def both(group: dist.ProcessGroup, fused: Any, plan: dict[str, Any], settings: dict[str, Any]) -> Any:
    return one_group(group, fused, plan), train(collection(group, fused, plan, sync_every=1, **settings), group)


def joined(held: list[Weights], name: str) -> torch.Tensor:
    """What ranks together have of a table; of a layer, the first one's."""
    parts = [weights[name] for weights in held if name in weights]
    return torch.stack(parts).nanmean(0) if "/" in name else parts[0]


def assert_one_training(found: list[Any], groups: list[list[int]]) -> None:
    """Each group's tables together are those of the one group, and replicas are alike to the last bit."""
    for (losses, _), (losses_2d, _) in found:
        torch.testing.assert_close(losses_2d, losses, rtol=1e-5, atol=1e-5)
    for name in {name for one, _ in found for name in one[1]}:
        wanted = joined([one[1] for one, _ in found], name)
        given = [joined([found[rank][1][1] for rank in ranks], name) for ranks in groups]
        torch.testing.assert_close(given[0], wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert all(torch.equal(given[0], other) for other in given[1:]), name


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam", "partial_rowwise_lamb"])
def test_every_step_equals_one_group_on_the_same_global_batch(optimizer: str) -> None:
    fused = {"optimizer": RULES[optimizer].kind, "learning_rate": 0.05}
    by_element = optimizer in ("sgd", "adagrad", "adam")  # what rows decide changes where columns are cut otherwise
    settings = {"use_inter_host_allreduce": True}
    found = on_ranks(WORLD, both, fused, {"columns": by_element}, settings)
    assert_one_training(found, [[0, 1], [2, 3]])


def test_groups_across_hosts_and_groups_of_one_rank_are_one_training_too() -> None:
    fused = {"optimizer": RULES["rowwise_adagrad"].kind, "learning_rate": 0.05}
    found = on_ranks(WORLD, both, fused, {"columns": False}, {})
    assert_one_training(found, [[0, 2], [1, 3]])
    alone = on_ranks(WORLD, both, fused, {"columns": False}, {"sharding_group_size": 1})
    assert_one_training(alone, [[0], [1], [2], [3]])


def test_tables_of_a_dense_optimizer_are_one_training_too() -> None:
    found = on_ranks(WORLD, both, None, {"kernel": "dense"}, {})
    assert_one_training(found, [[0, 2], [1, 3]])


SGD = {"optimizer": RULES["sgd"].kind, "learning_rate": 0.05}
ADAGRAD = {"optimizer": RULES["rowwise_adagrad"].kind, "learning_rate": 0.05}


def synced_by_hand(group: dist.ProcessGroup) -> Any:
    model = collection(group, SGD, {})
    model.after_step = model.sync  # type: ignore[method-assign]
    return one_group(group, SGD, {}), train(model, group)


def test_averages_after_each_step_are_one_training_with_a_linear_optimizer() -> None:
    assert_one_training(on_ranks(WORLD, synced_by_hand), [[0, 2], [1, 3]])


def three_local_steps(group: dist.ProcessGroup) -> Any:
    model = collection(group, ADAGRAD, {}, sync_every=4)
    first, apart = whole_tables(model), train(model, group, steps=3)[1]
    model.after_step()
    return first, apart, whole_tables(model)


def test_local_steps_are_averaged_over_groups_with_their_state() -> None:
    found = on_ranks(WORLD, three_local_steps)
    for ranks in ([0, 1], [2, 3]):  # replicas of each other
        (first, one, after), (_, other, other_after) = (found[rank] for rank in ranks)
        for name, start in first.items():
            mean = torch.stack([one[name], other[name]]).mean(0)
            torch.testing.assert_close(after[name], mean, equal_nan=True, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(after[name], other_after[name], equal_nan=True, rtol=0, atol=0)
            untouched = ((one[name] == start) & (other[name] == start)).all(1)
            assert torch.equal(after[name][untouched], start[untouched])
            alike = torch.equal(one[name].nan_to_num(), other[name].nan_to_num())
            assert alike == (name.startswith("embedding_bags.embedding_bags.genre") or bool(start.isnan().all())), name


ROWS, DIM = 100, 8


def in_blocks(group: dist.ProcessGroup, block_numbers: int) -> Any:
    """Tables and states after local steps and an average in blocks, and how many numbers were averaged at a time."""
    model = collection(group, {"optimizer": "adagrad"}, {}, sync_every=10)
    train(model, group, 2)
    replicas, sizes = model.env.replica_pg, list[int]()  # type: ignore[attr-defined]

    def all_reduce(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            sizes.append(tensor.numel())
            comm.all_reduce(tensor, replicas).div_(replicas.size())

    average(model.kernels(), replicas, True, all_reduce, block_numbers)
    states = [state for kernel in model.kernels() for by_name in kernel.states() for state in by_name.values()]
    held = {name: weight.nan_to_num(-1.0) for name, weight in whole_tables(model).items()}
    return held, [state.clone() for state in states], sizes


def test_rows_are_averaged_in_blocks_as_all_at_once() -> None:
    whole, blocks = (on_ranks(4, in_blocks, block_numbers) for block_numbers in (1 << 24, 50))
    for one, other in zip(whole, blocks, strict=True):
        (tables_at_once, states_at_once, all_numbers), (tables_by_block, states_by_block, numbers) = one, other
        assert max(numbers) <= 50 < max(all_numbers) and sum(numbers) == sum(all_numbers)
        assert all(torch.equal(weight, tables_by_block[name]) for name, weight in tables_at_once.items())
        assert all(map(torch.equal, states_at_once, states_by_block))


def bytes_between(group: dist.ProcessGroup, ids: list[int], sync_every: int) -> Any:
    """What a step of a replica, a group of one rank, sends to the other one."""
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    plan = ShardingPlan({"": {"t": cut(table, T.TABLE_WISE, [0])}})
    sharders = [EmbeddingBagCollectionSharder(ADAGRAD)]
    collection = EmbeddingBagCollection([table])
    model = DMPCollection(collection, DEVICE, plan, 2, 1, group, sharders=sharders, sync_every=sync_every)
    kjt = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    with comm.count_bytes() as sent:
        model(kjt).wait().values().sum().backward()
        model.after_step()
        local = dict(sent)
        model.sync()
    return local, dict(sent)


def test_bytes_between_groups_are_those_of_touched_rows() -> None:
    ids = PerRank([[1, 2, 3, 3], [3, 4]])
    for every_step, later in on_ranks(2, bytes_between, ids, 1):
        most = 3  # distinct rows of a rank
        assert every_step == {"all_gather": 8 + most * (8 + 4 * DIM)} == later
    for local, synced in on_ranks(2, bytes_between, ids, 2):
        union = 4
        assert not any(local.values())
        assert synced == {"all_gather": 8 + most * 8, "all_reduce": union * (4 * DIM + 4)}  # 2 (R - 1) / R = 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sharding_group_size": 3}, "4 ranks cannot be divided into sharding groups of 3; .*: 1, 2, 4"),
        ({"world_size": 8}, "world_size=8, but the process group has 4 ranks"),
        (
            {"sharding_group_size": 1, "plan": 2},
            "the plan is for 2 ranks or more, but a sharding group has 1; plan for",
        ),
        ({"sync_every": 0}, "sync_every=0 must be at least 1"),
        ({"submodule_configs": []}, "submodule_configs is not supported"),
        ({"use_sharded_relay": True}, "use_sharded_relay is not supported"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(settings: dict[str, Any], error: str) -> None:
    assert all(re.search(error, told) for told in on_ranks(WORLD, refusal, settings))


def test_tables_in_host_memory_cannot_meet_every_step() -> None:
    table = tables()[0]
    spec = OptimizerSpec(replicas=Replicas(None, every_step=True))
    with pytest.raises(ValueError, match=r"'user': kernel 'fused_uvm' trains by fbgemm only, .* every 2 steps or more"):
        check_trainable(table, EmbeddingComputeKernel.FUSED_UVM, spec, torch.device("cuda"))
    local = OptimizerSpec(replicas=Replicas(None, every_step=False))
    check_trainable(table, EmbeddingComputeKernel.FUSED_UVM, local, torch.device("cuda"))


def refusal(group: dist.ProcessGroup, settings: dict[str, Any]) -> str:
    given = {"world_size": group.size(), "sharding_group_size": GROUP} | settings
    plan = ShardingPlan({"embedding_bags": mixed(given.pop("plan", given["sharding_group_size"]))})
    with pytest.raises(ValueError) as caught:
        by_torchrec.DMPCollection(model_and_optimizer()[0], DEVICE, plan, global_pg=group, **given)
    return str(caught.value)


def own_seeds(group: dist.ProcessGroup) -> Any:
    """Every rank draws its own model, and says what it has of tables and layers when they are sharded."""
    model, _ = model_and_optimizer(seed=group.rank())
    plan = ShardingPlan({"embedding_bags": mixed(GROUP)})
    made = DMPCollection(model, DEVICE, plan, group.size(), GROUP, group)
    return whole_tables(made), {n: p.detach() for n, p in made.other_parameters().items()}, list(made.state_dict())


def test_groups_begin_alike() -> None:
    found = on_ranks(WORLD, own_seeds)
    for one, other in (found[:2], found[2:]):
        for mine, others in zip(one[:2], other[:2], strict=True):
            for name, value in mine.items():
                torch.testing.assert_close(value, others[name], equal_nan=True, rtol=0, atol=0)
        assert one[2] == other[2]


def planned(group: dist.ProcessGroup) -> Any:
    model = DMPCollection(model_and_optimizer()[0], DEVICE, None, WORLD, GROUP, group)
    return model.plan.to_json(), model.replicas


def test_without_a_plan_one_is_made_for_a_group() -> None:
    plans = on_ranks(WORLD, planned)
    assert len({plan for plan, _ in plans}) == 1
    assert ShardingPlan.from_json(plans[0][0]).min_world_size <= GROUP and plans[0][1] == 2


def sequence_steps(group: dist.ProcessGroup, replicas: int, dedup: bool) -> tuple[torch.Tensor, Weights]:
    """What a rank gets in a third step of an id-by-id collection, and its shards then."""
    table = EmbeddingConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f", "g"])
    size = group.size() // replicas
    plan = ShardingPlan({"": {"t": cut(table, T.ROW_WISE, list(range(size)))}})
    sharders: list[Any] = [EmbeddingCollectionSharder(ADAGRAD, dedup=dedup)]
    module = EmbeddingCollection([table], device=torch.device("cpu"), seed=3)
    model: DistributedModelParallel
    if replicas == 1:
        model = DistributedModelParallel(module, ShardingEnv.from_process_group(group), DEVICE, plan, sharders)
    else:
        model = DMPCollection(module, DEVICE, plan, group.size(), size, group, sharders=sharders, sync_every=1)
    random = torch.Generator().manual_seed(group.rank())
    for _ in range(3):
        lengths = torch.randint(0, 4, (8,), generator=random)
        ids = torch.randint(0, 50, (int(lengths.sum()),), generator=random)
        found = model(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)).wait()
        vectors = torch.cat([found["f"].values(), found["g"].values()])
        vectors.square().sum().backward()
    return vectors.detach(), whole_tables(model)


@pytest.mark.parametrize("dedup", [False, True])
def test_sequences_of_two_groups_are_one_training(dedup: bool) -> None:
    one, two = on_ranks(WORLD, sequence_steps, 1, dedup), on_ranks(WORLD, sequence_steps, 2, dedup)
    for (vectors, _), (others, _) in zip(one, two, strict=True):
        torch.testing.assert_close(others, vectors, rtol=1e-5, atol=1e-5)
    for name in {name for _, held in one for name in held}:
        wanted = joined([held for _, held in one], name)
        for ranks in ([0, 2], [1, 3]):
            torch.testing.assert_close(joined([two[rank][1] for rank in ranks], name), wanted, rtol=1e-5, atol=1e-5)
