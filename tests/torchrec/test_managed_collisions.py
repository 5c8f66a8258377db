"""Managed collisions on several ranks: all ranks give an id the same row, that of one process on the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from rayrec.distributed import DistributedModelParallel, ShardingEnv, ShardingPlan
from rayrec.optim import apply_optimizer_in_backward
from rayrec.torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from rayrec.torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from rayrec.torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tests.ranks import PerRank, on_ranks

CONFIG = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=7, feature_names=["f"])
STEPS, WORLD = 7, 2


def model() -> torch.nn.ModuleDict:
    ebc = EmbeddingBagCollection(tables=[CONFIG], seed=3)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    rows = MCHManagedCollisionModule(7, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 2)
    collisions = ManagedCollisionCollection({"t": rows}, [CONFIG])
    return torch.nn.ModuleDict({"mc": ManagedCollisionEmbeddingBagCollection(ebc, collisions, True)})


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    """Unequally many ids a rank, drifting over the steps."""
    lengths = torch.tensor([2, 0, 1 + rank + step % 2])
    drawn = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(4 * step, 4 * step + 12, (int(lengths.sum()),), generator=drawn)
    return KeyedJaggedTensor(["f"], ids, lengths=lengths)


def trained(module: Any, batches: list[KeyedJaggedTensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    rows = []
    for each in batches:
        vectors, remapped = module.mc(each)
        rows.append(remapped.values().tolist())
        vectors.values().square().mean(dim=0).sum().backward()
    return rows, {name: value for name, value in module.state_dict().items() if "_mch" in name}


def on_rank(group: Any, batches: list[KeyedJaggedTensor]) -> Any:
    whole = model()
    tables = construct_module_sharding_plan(
        whole["mc"]._embedding_module, {"t": row_wise(compute_kernel="fused")}, None, WORLD, WORLD, "cpu"
    )
    plan = ShardingPlan({"mc._embedding_module": tables})
    parallel = DistributedModelParallel(whole, ShardingEnv.from_process_group(group), torch.device("cpu"), plan)
    rows, state = trained(parallel.module, batches)
    weight = parallel.state_dict()["mc._embedding_module.embedding_bags.t.weight"].local_shards()[0].tensor
    return rows, state, weight


def test_every_rank_gives_an_id_the_row_that_one_process_gives_it() -> None:
    per_rank = [[batch(step, rank) for step in range(STEPS)] for rank in range(WORLD)]
    found = on_ranks(WORLD, on_rank, PerRank(per_rank))
    alone = model()
    both = [
        KeyedJaggedTensor(
            ["f"],
            torch.cat([per_rank[rank][step].values() for rank in range(WORLD)]),
            lengths=torch.cat([per_rank[rank][step].lengths() for rank in range(WORLD)]),
        )
        for step in range(STEPS)
    ]
    rows, state = trained(alone, both)
    assert [first + second for first, second in zip(found[0][0], found[1][0], strict=True)] == rows
    assert len({tuple(each) for each in rows}) > 2 and max(max(each) for each in rows) == 6
    for _, own, _ in found:
        assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in state)
    sharded = torch.cat([weight for *_, weight in found])
    torch.testing.assert_close(sharded, alone.state_dict()["mc._embedding_module.embedding_bags.t.weight"])


def filtered(group: Any) -> tuple[torch.Tensor, float]:
    """The ids that have a row after some steps of ids that pass a filter by chance, and what a rank draws next."""
    torch.manual_seed(group.rank())
    ebc = EmbeddingBagCollection(tables=[WIDE], seed=3)
    policy = LFU_EvictionPolicy(lambda counts: probabilistic_threshold_filter(counts, 0.3))
    rows = MCHManagedCollisionModule(64, torch.device("cpu"), policy, 1, name="t")
    whole = ManagedCollisionEmbeddingBagCollection(ebc, ManagedCollisionCollection({"t": rows}, [WIDE]), True)
    parallel = DistributedModelParallel(whole, ShardingEnv.from_process_group(group), torch.device("cpu"))
    for step in range(3):
        ids = torch.arange(200) + 150 * step
        parallel(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(200, dtype=torch.int64)))
    return rows.get_buffer("_mch_sorted_raw_ids"), float(torch.rand(()))


WIDE = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=64, feature_names=["f"])


def test_ranks_draw_alike_where_ids_pass_a_filter_by_chance() -> None:
    """Each rank drew from its own generator: one id had different rows on different ranks."""
    (ids, drawn), (other_ids, other_drawn) = on_ranks(2, filtered)
    assert torch.equal(ids, other_ids)
    kept = ids[ids < 500]
    assert len(kept) > 10 and not torch.equal(kept, torch.arange(len(kept)))  # some passed, some did not
    torch.manual_seed(0)
    assert drawn != other_drawn and drawn == own_draw(0), "a rank's own generator goes on as if nothing was drawn"


def own_draw(rank: int) -> float:
    torch.manual_seed(rank)
    EmbeddingBagCollection(tables=[WIDE], seed=3)
    return float(torch.rand(()))


@pytest.mark.parametrize("keep", [None, dynamic_threshold_filter, average_threshold_filter])
def test_an_empty_first_batch_leaves_room_for_the_next_ones_ids(keep: Any) -> None:
    """The first batch sets the size of the history: an empty one set it to 0."""
    rows = MCHManagedCollisionModule(7, torch.device("cpu"), LFU_EvictionPolicy(keep), 1)
    for ids in ([], [40, 40, 40, 40, 41]):
        rows({"f": JaggedTensor(torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids)]))})
    kept = rows.get_buffer("_mch_sorted_raw_ids").tolist()
    expected = {None: [40, 41], average_threshold_filter: [40], dynamic_threshold_filter: []}[keep]
    assert [one for one in kept if one < 100] == expected
