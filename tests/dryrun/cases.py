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
from rayrec.distributed.plan.module_sharder import modules_to_shard
from rayrec.models import MODELS, RETRIEVERS, Batch, TwoTower
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
        model: "sum", "mean", "weighted", "dedup" (pooled, each distinct id sent once) or "sequence"; or one of
            `BUILT_IN`, with histories.
        kernel: of every table.
        decay: L2 weight decay.
        hosts: of equally many ranks.
        data_type: of every table.
        optimizer: settings of the tables' optimizer.
        frozen: whether tables have no `requires_grad`.
        pipelined: batches come out of a TrainPipeline.
        resumed: before the last step everything is saved, spoilt and loaded.
        bf16: the dense part computes in bfloat16, without dropout of attention weights.
        loss: kind of loss of a retriever; empty: its default.
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
    bf16: bool = False
    loss: str = ""
    steps: int = 3  # DDP builds its buckets again in the second

    @property
    def name(self) -> str:
        return (
            f"{self.plan}-{self.model}-{self.kernel}-{self.world}-{self.data_type}-{self.optimizer}-{self.decay}"
            + "-frozen" * self.frozen
            + "-pipelined" * self.pipelined
            + "-resumed" * self.resumed
            + "-bf16" * self.bf16
        )


BUILT_IN = ("sasrec", "hstu", "two_tower", "din")


def built_in(case: Case) -> torch.nn.Module:
    """A model with histories `f0`; a target `f1`, if there is one, is read from the same table."""
    shape: dict[str, Any] = {
        "num_embeddings": case.rows,
        "embedding_dim": case.dim,
        "data_type": DataType(case.data_type),
    }
    if case.model == "two_tower":
        tables = [EmbeddingConfig(name=f"t{i}", feature_names=[f"f{i}"], **shape) for i in range(case.tables)]
        loss = {"kind": "mixed", "negatives": 16}
        return TwoTower(tables, 0, item="f1", towers=[16, 8], loss=loss, device=DEVICE)
    item = ["f0", "f1"] if case.model == "din" else ["f0"]
    tables = [EmbeddingBagConfig(name="t0", feature_names=item, **shape)]
    if case.model == "din":
        tables += [EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i + 1}"], **shape) for i in (1, 2)]
        attention = [{"history": ["f0"], "target": ["f1"]}]
        return MODELS["din"](tables, 0, over_arch=[8, 1], attention=attention, device=DEVICE)
    settings: dict[str, Any] = {"times": "h.at"} if case.model == "hstu" else {}
    settings |= {"attention_dropout": 0.0} if case.bf16 else {}
    settings |= {"loss": {"kind": case.loss}} if case.loss else {}
    return RETRIEVERS[case.model](tables, 0, history="f0", max_length=case.longest, device=DEVICE, **settings)


def make_rows(case: Case, generator: torch.Generator) -> Batch:
    """A batch of a built-in model on the host."""
    names = {"two_tower": range(case.tables), "din": range(4)}.get(case.model, range(1))
    lengths = [torch.ones(case.batch, dtype=torch.int64) for _ in names]
    lengths[0] = torch.randint(0, case.longest + 2, (case.batch,), generator=generator)
    total = int(sum(of.sum() for of in lengths))
    values = torch.randint(0, case.rows, (total,), generator=generator)
    kjt = KeyedJaggedTensor([f"f{i}" for i in names], values, lengths=torch.cat(lengths), stride=case.batch)
    label, count = (torch.rand(case.batch, generator=generator) > 0.5).float(), int(lengths[0].sum())
    lists = {"h.at": torch.arange(count)} if case.model == "hstu" else {}
    return Batch(torch.empty(case.batch, 0), kjt, label, weight=torch.rand(case.batch), lists=lists)


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
    if case.model in BUILT_IN:
        model, plan = built_in(case), plan_of(case).plan["tables"]
        paths = modules_to_shard(model, sharders)
        shardings = {path: {name: plan[name] for name in names_of(part)} for path, part, _ in paths}
        return DistributedModelParallel(model, env=env, device=DEVICE, plan=ShardingPlan(shardings), sharders=sharders)
    return DistributedModelParallel(Head(case), env=env, device=DEVICE, plan=plan_of(case), sharders=sharders)


def names_of(collection: Any) -> list[str]:
    bags = isinstance(collection, EmbeddingBagCollection)
    return [table.name for table in (collection.embedding_bag_configs() if bags else collection.embedding_configs())]


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
