"""What is measured: a small model under a plan, a step of it, and what the step met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import (
    Awaitable,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ParameterSharding,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    comm,
)
from rayrec.distributed.plan.cuts import CUTS
from rayrec.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.sparse import KeyedJaggedTensor
from tests.dryrun.book import BOOK
from tests.dryrun.tensors import DEVICE

T = ShardingType
MIXED = (T.TABLE_WISE, T.ROW_WISE, T.COLUMN_WISE, T.TABLE_ROW_WISE)
PLANS = {kind.value: (kind,) for kind in ShardingType} | {"mixed": MIXED, "mixed_dp": (*MIXED, T.DATA_PARALLEL)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a plan and a world.

    Args:
        plan: the sharding types that tables take in turn.
        model: "sum", "mean", "weighted", "dedup" (pooled, each distinct id sent once) or "sequence".
        kernel: of every table.
        decay: L2 weight decay.
        hosts: of equally many ranks.
        data_type: of every table.
        optimizer: settings of the tables' optimizer.
        frozen: whether tables have no `requires_grad`.
        pipelined: batches come out of a TrainPipeline.
        resumed: before the last step everything is saved, spoilt and loaded.
    """

    world: int = 8
    plan: str = "table_wise"
    model: str = "sum"
    kernel: str = "fused"
    hosts: int = 1
    tables: int = 5
    rows: int = 100
    dim: int = 32
    batch: int = 16
    longest: int = 3
    data_type: str = "FP32"
    optimizer: str = "rowwise_adagrad"
    decay: float = 0.0
    frozen: bool = False
    pipelined: bool = False
    resumed: bool = False
    steps: int = 3  # DDP builds its buckets again in the second

    @property
    def name(self) -> str:
        return (
            f"{self.plan}-{self.model}-{self.kernel}-{self.world}-{self.data_type}-{self.optimizer}-{self.decay}"
            + "-frozen" * self.frozen
            + "-pipelined" * self.pipelined
            + "-resumed" * self.resumed
        )


class Head(torch.nn.Module):
    """Tables, a dense layer, a loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        names = [(f"t{i}", [f"f{i}"]) for i in range(case.tables)]
        shape = {"num_embeddings": case.rows, "embedding_dim": case.dim, "data_type": DataType(case.data_type)}
        pooling = PoolingType.MEAN if case.model == "mean" else PoolingType.SUM
        self.tables: torch.nn.Module
        if case.model == "sequence":
            configs = [EmbeddingConfig(name=name, feature_names=keys, **shape) for name, keys in names]
            self.tables = EmbeddingCollection(configs, device="meta")
        else:
            bags = [EmbeddingBagConfig(name=n, feature_names=keys, pooling=pooling, **shape) for n, keys in names]
            self.tables = EmbeddingBagCollection(bags, is_weighted=case.model == "weighted", device="meta")
        self.tables.requires_grad_(not case.frozen)
        self.dense = torch.nn.Linear(case.dim, 1, device=DEVICE)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        found = self.tables(kjt).wait()
        blocks = list(found.to_dict().values()) if not isinstance(found, dict) else [j.values() for j in found.values()]
        return torch.stack([self.dense(block).sum() for block in blocks]).mean()


def plan_of(case: Case) -> ShardingPlan:
    everyone = list(range(case.world))
    size = max(1, case.world // case.hosts)
    hosts = [everyone[first : first + size] for first in range(0, case.world, size)]
    shardings = {}
    for number in range(case.tables):
        kind = PLANS[case.plan][number % len(PLANS[case.plan])]
        ranks: Any = {
            T.TABLE_WISE: [number % case.world],
            T.COLUMN_WISE: [(number + n) % case.world for n in range(min(4, case.world))],
            T.TABLE_ROW_WISE: hosts[number % len(hosts)],
            T.GRID_SHARD: hosts,
        }.get(kind, everyone)
        shards = CUTS[kind](f"t{number}", case.rows, case.dim, ranks)
        shardings[f"t{number}"] = ParameterSharding(
            sharding_type=kind.value, compute_kernel=case.kernel, shards=shards, device="cuda"
        )
    return ShardingPlan({"tables": shardings})


def make_model(case: Case) -> DistributedModelParallel:
    params = {"optimizer": case.optimizer, "learning_rate": 0.01, "weight_decay": case.decay}
    params |= {"weight_decay_mode": "l2"} if case.decay else {}
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(params, dedup=case.model == "dedup"),
        EmbeddingCollectionSharder(params),
    ]
    group = dist.group.WORLD
    assert group is not None
    env = ShardingEnv.from_process_group(group, case.world // case.hosts)
    return DistributedModelParallel(Head(case), env=env, device=DEVICE, plan=plan_of(case), sharders=sharders)


def make_batch(case: Case, generator: torch.Generator) -> KeyedJaggedTensor:
    """A pinned batch on the host."""
    lengths = torch.randint(0, case.longest + 1, (case.tables * case.batch,), generator=generator)
    values = torch.randint(0, case.rows, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator) if case.model == "weighted" else None
    keys = [f"f{number}" for number in range(case.tables)]
    return KeyedJaggedTensor(keys, values, lengths=lengths, weights=weights, stride=case.batch).pin_memory()


def subgroup(group: Any, ranks: Any, device: Any) -> Any:
    """As `comm.subgroup`; ranks that follow one another are those of a host."""
    made = dist.new_group(list(ranks))
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        BOOK.inner_groups.add(made.group_name)
    return made


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process as the first rank of many, of which there are no others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    BOOK.host_groups = set()

    def host_group(group: Any, device: Any) -> Any:
        hosts = dist.new_group(dist.get_process_group_ranks(group))
        BOOK.host_groups.add(hosts.group_name)
        return hosts

    comm.subgroup = subgroup  # type: ignore[assignment]
    comm.host_group = host_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.destroy_process_group()


def mark_stages() -> None:
    """Books operators under the stage of a step that they belong to."""
    for cls in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
        for name in ("input_dist", "lookup", "output_dist"):
            _staged(cls, name, name)
        _staged(cls, "forward", "input_dist")
    _staged(Awaitable, "wait", "output_dist", only_from="dense")


def _staged(cls: Any, name: str, stage: str, only_from: str | None = None) -> None:
    real: Callable[..., Any] = getattr(cls, name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = BOOK.stage
        if only_from not in (None, before):
            return real(self, *args, **kwargs)
        BOOK.stage = stage
        try:
            return real(self, *args, **kwargs)
        finally:
            BOOK.stage = before

    setattr(cls, name, wrapper)
