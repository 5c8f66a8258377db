"""Row partials added up on their host first: the same function as one plain process, and fewer bytes between hosts.

Four gloo ranks stand for two hosts of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import (
    BF16,
    FP16,
    Codec,
    EmbeddingBagCollectionSharder,
    ModuleSharding,
    NumberFormat,
    ShardingEnv,
    ShardingType,
    comm,
    int8_rows,
)
from rayrec.distributed.executors import pooled as tiers
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE, drawn, exchanges
from tests.distributed import test_variable_batch as variable
from tests.distributed.oracle import (
    ADAGRAD,
    ROWWISE,
    SGD,
    by_message,
    cut,
    draw_kjt,
    targets,
    train_plain,
    train_sharded,
)
from tests.distributed.test_equality import check, uniform
from tests.distributed.test_properties import assert_same
from tests.ranks import on_ranks

T = ShardingType
LOCAL, HOSTS = 2, [[0, 1], [2, 3]]
WORLD = LOCAL * len(HOSTS)
MIXED = [
    (T.DATA_PARALLEL, range(WORLD)),
    (T.TABLE_ROW_WISE, HOSTS[1]),
    (T.TABLE_WISE, [2]),
    (T.COLUMN_WISE, [3, 0]),
    (T.GRID_SHARD, HOSTS),
]


@contextmanager
def however_few() -> Iterator[None]:
    """Small batches, too, go by way of the hosts."""
    with mock.patch.object(tiers, "MIN_SAVED_BYTES", 0):
        yield


def train_on_hosts(group: dist.ProcessGroup, *args: Any, local: int = LOCAL) -> Any:
    """As `train_sharded`, on hosts of two; five exchanges a step show that the hierarchical executor has run."""
    with however_few(), comm.count_collectives() as counts:
        result = train_sharded(group, *args, local_world_size=local)
    steps = len(result[0])
    assert 5 * steps <= counts["all_to_all"] <= 6 * steps, counts  # a sixth where more ids come than were foreseen
    return result


@pytest.mark.parametrize("kind", [T.ROW_WISE, T.TABLE_ROW_WISE, T.GRID_SHARD], ids=lambda kind: kind.value)
@pytest.mark.parametrize("sizes", [None, (5, 0, 2, 1), (0, 0, 0, 3)], ids=str)
def test_tables_cut_by_rows_equal_one_process(kind: ShardingType, sizes: tuple[int, ...] | None) -> None:
    check(WORLD, uniform(kind, WORLD), ADAGRAD, batch_sizes=sizes, train=train_on_hosts)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixed_plan_equals_one_process(pooling: PoolingType, weighted: bool) -> None:
    check(WORLD, MIXED, SGD, pooling, weighted, batch_sizes=(3, 4, 0, 2), train=train_on_hosts)


def test_row_wise_adagrad_equals_one_process() -> None:
    check(WORLD, uniform(T.TABLE_ROW_WISE, WORLD), ROWWISE, train=train_on_hosts)


@pytest.mark.parametrize("local", [3])
def test_more_hosts_and_moreranks_per_host_equal_one_process(local: int) -> None:
    ranks = list(range(6))
    hosts = [ranks[first : first + local] for first in range(0, 6, local)]
    kinds = [(T.TABLE_ROW_WISE, hosts[-1]), (T.ROW_WISE, ranks), (T.TABLE_WISE, [4]), (T.TABLE_WISE, [1])]

    check(6, [*kinds, (T.ROW_WISE, ranks[::-1])], ADAGRAD, train=partial(train_on_hosts, local=local))


def train_little(group: dist.ProcessGroup, *args: Any) -> Any:
    with comm.count_collectives() as counts:
        result = train_sharded(group, *args, local_world_size=LOCAL)
    steps = len(result[0])
    assert 3 * steps <= counts["all_to_all"] <= 4 * steps, counts
    return result


def test_small_batches_take_the_flat_way() -> None:
    check(WORLD, MIXED, SGD, weighted=True, batch_sizes=(3, 4, 0, 2), train=train_little)


@st.composite
def problems(draw: st.DrawFn) -> Any:
    """Tables, a plan for two hosts of two ranks that cuts at least one of them by rows, and batches of drawn sizes."""
    features = [f"f{n}" for n in range(4)]
    tables, plan = [], {}
    for number in range(draw(st.integers(1, 4))):
        cut_by_rows = number == 0
        table = EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=draw(st.integers(4 if cut_by_rows else 1, 12)),
            embedding_dim=64 if cut_by_rows else draw(st.sampled_from([8, 16, 24])),
            feature_names=draw(st.lists(st.sampled_from(features), min_size=1, max_size=2, unique=True)),
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        by_rows = [T.ROW_WISE, T.TABLE_ROW_WISE, T.GRID_SHARD]
        kind = draw(st.sampled_from(by_rows if cut_by_rows else list(T)))
        ranks: Any = draw(st.permutations(range(WORLD)))
        match kind:
            case T.TABLE_WISE:
                ranks = ranks[:1]
            case T.COLUMN_WISE | T.TABLE_COLUMN_WISE:
                ranks = ranks[:2]
            case T.TABLE_ROW_WISE:
                ranks = draw(st.permutations(draw(st.sampled_from(HOSTS))))
            case T.GRID_SHARD:
                ranks = draw(st.permutations(HOSTS))
        tables.append(table)
        plan[table.name] = cut(table, kind, ranks)
    sizes = draw(st.lists(st.integers(0, 4), min_size=WORLD, max_size=WORLD).filter(any))
    return tables, plan, sizes, draw(st.booleans()), draw(st.integers(0, 1 << 30))


@settings(max_examples=drawn(12), suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_drawn_plans_equal_one_process(problem: Any) -> None:
    tables, plan, sizes, weighted, seed = problem
    generator = torch.Generator().manual_seed(seed)
    steps = [[draw_kjt(generator, tables, size, 3, weighted) for size in sizes] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    assert_same(ebc, plan, steps, ADAGRAD, train_plain(ebc, steps, ADAGRAD), train=train_on_hosts)


TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=16, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=32, feature_names=["f3"], pooling=PoolingType.MEAN),
]
PLAN = {
    "a": cut(TABLES[0], T.TABLE_ROW_WISE, HOSTS[0]),
    "b": cut(TABLES[1], T.GRID_SHARD, HOSTS),
}


def drawn(sizes: tuple[int, ...], weighted: bool = False) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(2)
    return [draw_kjt(generator, TABLES, size, 4, weighted) for size in sizes]


@pytest.mark.parametrize("forward", [FP16, BF16, int8_rows()], ids=lambda kind: kind.name)
def test_vectors_may_travel_in_fewer_bits(forward: NumberFormat) -> None:
    steps, ebc = [drawn((4, 2, 3, 1))], EmbeddingBagCollection(TABLES, seed=2)
    (expected,), _ = train_plain(ebc, steps, SGD)
    answers = on_ranks(WORLD, train_on_hosts, ebc, PLAN, steps, SGD, Codec(forward, BF16))
    got = torch.cat([answer[0][0] for answer in answers])
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert not torch.equal(got, expected)


def shard(group: dist.ProcessGroup, plan: ModuleSharding, local: int, weighted: bool = False) -> Any:
    ebc = EmbeddingBagCollection(TABLES, is_weighted=weighted, seed=1)
    env = ShardingEnv.from_process_group(group, local)
    return EmbeddingBagCollectionSharder(SGD).shard(ebc, plan, env, DEVICE)


def vector_bytes(group: dist.ProcessGroup, local: int, plan: ModuleSharding, batches: list[KeyedJaggedTensor]) -> Any:
    """Bytes of vectors and gradients that this rank sends to ranks of the other host, and the step's collectives."""
    sharded, kjt = shard(group, plan, local), batches[group.rank()]
    sent: Counter[str] = Counter()
    exchange = comm.all_to_all

    def counted(output: Any, inputs: torch.Tensor, outs: Any, ins: Any, group: dist.ProcessGroup) -> Any:
        if inputs.dtype.is_floating_point:
            for rank, elements in zip(dist.get_process_group_ranks(group), ins, strict=True):
                sent["far" if rank // LOCAL != dist.get_rank() // LOCAL else "near"] += elements * inputs.itemsize
        return exchange(output, inputs, outs, ins, group)

    with (
        by_message(),
        however_few(),
        mock.patch.object(comm, "all_to_all", counted),
        comm.count_collectives() as counts,
    ):
        targets(sharded(kjt).wait()).sum().backward()
    return sent["far"], dict(counts)


def test_a_vector_leaves_its_host_once() -> None:
    batches = drawn((4, 2, 3, 5))
    flat = on_ranks(WORLD, vector_bytes, 1, PLAN, batches)
    by_host = on_ranks(WORLD, vector_bytes, LOCAL, PLAN, batches)
    assert sum(far for far, _ in flat) == LOCAL * sum(far for far, _ in by_host) > 0
    assert all(counts == exchanges(3) for _, counts in flat)
    assert all(counts == exchanges(5) for _, counts in by_host)
    # all ranks of a host take an equal part in what it sends: 2 directions, 32 + 16 or 16 columns, 4 bytes
    assert [far for far, _ in by_host] == [
        4 * (48 * there + 16 * here) if rank < LOCAL else 4 * (16 * there + 48 * here)
        for rank, (here, there) in enumerate([(4, 3), (2, 5), (3, 4), (5, 2)])
    ]


def executor_of(group: dist.ProcessGroup, plan: ModuleSharding, local: int | None) -> str:
    env = ShardingEnv.from_process_group(group, local)
    return str(EmbeddingBagCollectionSharder().shard(EmbeddingBagCollection(TABLES), plan, env, DEVICE).executors[0])


@pytest.mark.parametrize(
    "kinds, local, two_tiers",
    [
        ((T.TABLE_ROW_WISE, T.TABLE_ROW_WISE), 2, True),
        ((T.TABLE_ROW_WISE, T.TABLE_WISE), 2, True),
        ((T.TABLE_WISE, T.TABLE_ROW_WISE), 2, True),
        ((T.TABLE_WISE, T.COLUMN_WISE), 2, False),
        ((T.TABLE_ROW_WISE, T.TABLE_ROW_WISE), 1, False),
        ((T.TABLE_ROW_WISE, T.TABLE_ROW_WISE), 3, False),
        ((T.TABLE_ROW_WISE, T.TABLE_ROW_WISE), 4, False),
        ((T.TABLE_ROW_WISE, T.TABLE_ROW_WISE), None, False),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else "+".join(kind.value for kind in value),
)
def test_it_runs_where_it_saves_enough(kinds: tuple[ShardingType, ...], local: int | None, two_tiers: bool) -> None:
    """Not on one host (the machine of the four ranks, if nothing is said), nor on hosts of one rank or unlike size."""
    ranks: dict[ShardingType, Any] = {T.TABLE_ROW_WISE: HOSTS[0], T.TABLE_WISE: [1], T.COLUMN_WISE: [1, 2]}
    plan = {table.name: cut(table, kind, ranks[kind]) for table, kind in zip(TABLES, kinds, strict=True)}
    assert all(("hosts of" in text) == two_tiers for text in on_ranks(WORLD, executor_of, plan, local))


def weight_gradient(group: dist.ProcessGroup, local: int, batches: list[KeyedJaggedTensor]) -> torch.Tensor:
    sharded, kjt = shard(group, PLAN, local, weighted=True), batches[group.rank()]
    weights = kjt.weights().clone().requires_grad_()
    given = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, lengths=kjt.lengths(), stride=kjt.stride())
    with however_few():
        targets(sharded(given).wait()).sum().backward()
    assert weights.grad is not None
    return weights.grad


def test_weights_of_ids_get_their_gradients() -> None:
    batches = drawn((4, 2, 0, 5), weighted=True)
    flat = on_ranks(WORLD, weight_gradient, 1, batches)
    for expected, got in zip(flat, on_ranks(WORLD, weight_gradient, LOCAL, batches), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def answer_to(group: dist.ProcessGroup, batches: list[KeyedJaggedTensor]) -> str:
    with pytest.raises(ValueError) as error:
        shard(group, PLAN, LOCAL)(batches[group.rank()]).wait()
    return str(error.value)


def test_an_id_outside_its_table_stops_every_rank() -> None:
    bad = KeyedJaggedTensor(["f1", "f2", "f3"], torch.tensor([1, 3, 5]), lengths=torch.tensor([1, 1, 1]))
    mine, *others = on_ranks(WORLD, answer_to, [bad, *drawn((3, 2, 0))])
    assert "'f3': id 5" in mine
    assert all("rank 0" in other for other in others)


def look_up(group: dist.ProcessGroup, plan: ModuleSharding) -> torch.Tensor:
    env = ShardingEnv.from_process_group(group, LOCAL)
    ebc = EmbeddingBagCollection(variable.TABLES, seed=1)
    with however_few():
        vectors = EmbeddingBagCollectionSharder().shard(ebc, plan, env, DEVICE)(variable.batch()).wait().values()
    return vectors.detach()


def test_a_batch_size_that_varies_by_key_equals_unsharded() -> None:
    expected = EmbeddingBagCollection(variable.TABLES, seed=1)(variable.batch()).values()
    plan = {table.name: cut(table, T.TABLE_ROW_WISE, HOSTS[1]) for table in variable.TABLES}
    for output in on_ranks(WORLD, look_up, plan):
        torch.testing.assert_close(output, expected)
