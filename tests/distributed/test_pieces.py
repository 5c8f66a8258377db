"""Row partials arrive in pieces: the same numbers, and never more than twice a rank's own result under way."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, EmbOptimType, ShardingEnv, ShardingType
from rayrec.distributed.vectors import pooled_exchange, transport
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from tests.device import DEVICE
from tests.distributed.oracle import by_message, cut, draw_kjt
from tests.ranks import on_ranks

TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=64, embedding_dim=16, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="b", num_embeddings=40, embedding_dim=8, feature_names=["f3"], pooling=PoolingType.MEAN),
]


class UnderWay:
    """Bytes that are on their way to this rank, and the most there ever were."""

    def __init__(self) -> None:
        self.now, self.most, self.times = 0, 0, 0
        self._real = transport.comm.all_to_all

    def all_to_all(self, output: torch.Tensor, *args: Any) -> Any:
        wait = self._real(output, *args)
        self.now, self.times = self.now + output.nbytes, self.times + 1
        self.most = max(self.most, self.now)

        def waited() -> None:
            wait()
            self.now -= output.nbytes

        return waited


class Gathers:
    """Number of gathers."""

    def __init__(self) -> None:
        self.times = 0
        self._real = transport.comm.all_gather

    def all_gather(self, *args: Any) -> torch.Tensor:
        self.times += 1
        return self._real(*args)


def backward_exchanges(pieces: int, equal_batches: bool) -> tuple[int, int]:
    """Exchanges and gathers of a backward pass after so many pieces forward: GPUs with equal batches gather."""
    return (0, 1) if DEVICE.type == "cuda" and equal_batches and pieces > 1 else (pieces, 0)


def train(group: dist.ProcessGroup, batches: list[int], least: int) -> Any:
    """Outputs and weights of three steps of a row-wise plan, and what was under way forward in the last one."""
    world = group.size()
    plan = {t.name: cut(t, ShardingType.ROW_WISE, list(range(world))) for t in TABLES}
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    env = ShardingEnv.from_process_group(group)
    module = EmbeddingBagCollection(TABLES, seed=1)
    sharded = EmbeddingBagCollectionSharder(params).shard(module, plan, env, DEVICE)
    generator, outputs = torch.Generator().manual_seed(group.rank()), []
    with mock.patch.object(pooled_exchange, "MIN_PIECE_BYTES", least), by_message():
        for _ in range(3):
            kjt = draw_kjt(generator, TABLES, batches[group.rank()], 3)
            ids = sharded.input_dist(kjt).wait()
            forward, backward, gathers = UnderWay(), UnderWay(), Gathers()
            with mock.patch.object(transport.comm, "all_to_all", forward.all_to_all):
                out = sharded.output_dist(sharded.lookup(ids)).wait().values()
            with mock.patch.multiple(transport.comm, all_to_all=backward.all_to_all, all_gather=gathers.all_gather):
                out.square().sum().backward()
            outputs.append(out.detach())
    weights = [item.weight.clone() for table in sharded.tables().values() for item in table.local]
    return outputs, weights, (forward.most, forward.times, (backward.times, gathers.times)), outputs[-1].nbytes


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_at_most_twice_the_own_result_is_under_way(world: int) -> None:
    batches = [24] * world
    whole = on_ranks(world, train, batches, 1 << 24)
    pieces = on_ranks(world, train, batches, 1)
    for one, other in zip(whole, pieces, strict=True):
        for got, wanted in zip([*other[0], *other[1]], [*one[0], *one[1]], strict=True):
            torch.testing.assert_close(got, wanted)
        assert one[2] == (world * one[3], 1, (1, 0))
        assert other[2][0] <= 2 * other[3]
        times = 1 if world == 2 else world
        assert other[2][1:] == (times, backward_exchanges(times, equal_batches=True))


def test_batches_of_unlike_size_are_cut_in_equally_many_pieces() -> None:
    batches = [7, 0, 30, 2]
    whole, pieces = (on_ranks(4, train, batches, least) for least in (1 << 24, 1))
    for one, other in zip(whole, pieces, strict=True):
        for got, wanted in zip([*other[0], *other[1]], [*one[0], *one[1]], strict=True):
            torch.testing.assert_close(got, wanted)
        assert other[2][1:] == (4, backward_exchanges(4, equal_batches=False))
