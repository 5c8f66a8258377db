"""Managed collisions on several ranks: all ranks give an id the same row, that of one process on the global batch."""

from __future__ import annotations

from typing import Any

import torch

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rayrec.distributed import DistributedModelParallel, ShardingEnv
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.optim import apply_optimizer_in_backward
from rayrec.torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from rayrec.torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from rayrec.torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
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
