"""Behind a device cache a second lookup before the backward of the first is refused, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, ShardingEnv, ShardingType
from rayrec.distributed.kernel import CacheGuard
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

GPU = torch.device("cuda")
REFUSED = r"tables \['cached'\]: a second lookup before the backward of the first, with kernel 'fused_uvm_caching'"
KERNELS = {"cached": "fused_uvm_caching", "plain": "fused"}


def configs(kind: type) -> list[Any]:
    return [kind(name=name, num_embeddings=6, embedding_dim=8, feature_names=[name]) for name in KERNELS]


def plan() -> dict[str, Any]:
    """Each table on a rank of its own."""
    return {
        table.name: cut(table, ShardingType.TABLE_WISE, [rank], KERNELS[table.name])
        for rank, table in enumerate(configs(EmbeddingBagConfig))
    }


def lookup_of_a_rank(requires_grad: bool = True) -> torch.Tensor:
    return torch.zeros(2, 3, requires_grad=requires_grad) * 1


def test_a_lookup_waits_for_the_backward_of_the_one_before() -> None:
    guard = CacheGuard(["cached"])
    out = lookup_of_a_rank()
    guard.check()
    guard.watch(out)
    with pytest.raises(RuntimeError, match=REFUSED):
        guard.check()
    out.sum().backward()
    guard.check()
    out = lookup_of_a_rank()
    guard.watch(out)
    del out  # its backward will never come
    guard.check()
    guard.watch(lookup_of_a_rank(requires_grad=False))
    guard.check()
    leaf = torch.zeros(0, requires_grad=True)  # of a rank without tables
    guard.watch(leaf)
    with pytest.raises(RuntimeError, match=REFUSED):
        guard.check()
    leaf.sum().backward()
    guard.check()


@pytest.mark.parametrize("device, kernel", [(torch.device("cpu"), "fused_uvm_caching"), (GPU, "fused_uvm")])
def test_without_a_device_cache_lookups_may_follow_each_other(device: torch.device, kernel: str) -> None:
    (table, _) = configs(EmbeddingBagConfig)
    assert CacheGuard.of({"cached": cut(table, ShardingType.TABLE_WISE, [0], kernel)}, device) is None


def look_up_twice(group: dist.ProcessGroup, bags: bool) -> list[str]:
    """One table on each rank, of which one is behind a cache, and a third rank without tables."""
    env = ShardingEnv.from_process_group(group)
    sharded: Any
    if bags:
        sharder: Any = EmbeddingBagCollectionSharder()
        sharded = sharder.shard(EmbeddingBagCollection(configs(EmbeddingBagConfig)), plan(), env, DEVICE)
    else:
        sharder = EmbeddingCollectionSharder()
        sharded = sharder.shard(EmbeddingCollection(configs(EmbeddingConfig)), plan(), env, DEVICE)
    for executor in sharded.executors:
        executor._cache = CacheGuard.of(plan(), GPU)
    kjt = KeyedJaggedTensor(["cached", "plain"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))

    def look_up() -> torch.Tensor:
        out = sharded(kjt).wait()
        return out.values() if bags else torch.cat([jagged.values() for jagged in out.values()])

    errors = []
    for _ in range(2):
        first = look_up()
        try:
            look_up()
        except RuntimeError as error:
            errors.append(str(error))
        first.sum().backward()
    return errors


@pytest.mark.parametrize("bags", [True, False])
def test_ranks_without_a_cached_table_raise_too(bags: bool) -> None:
    for errors in on_ranks(3, look_up_twice, bags):
        assert len(errors) == 2 and all("tables ['cached']: a second lookup" in error for error in errors)
