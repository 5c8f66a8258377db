"""Ids in one exchange where they fit what is foreseen, else in two: whatever sizes come, all ranks agree on which."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rayrec.distributed.ids.cpu_transport import IdTransport
from rayrec.distributed.ids.gpu_transport import GpuTransport

from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm import count_collectives
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.ids.batch import BATCH, GROUPS, VALUES, Ids
from rayrec.distributed.plan.shards import ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STREAMS = [2, 0, 1]  # of each rank
FREE = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def part_of(rank: int, batch: int, longest: int, seed: int, weighted: bool) -> Ids:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, longest + 1, (sum(STREAMS), batch), generator=generator)
    values = torch.randint(0, 1 << 40, (int(lengths.sum()),), generator=generator)
    return Ids(lengths, values, torch.rand(values.numel(), generator=generator) if weighted else None)


def send(
    group: dist.ProcessGroup, steps: list[list[tuple[int, int]]], weighted: bool, as_on_gpus: bool = False
) -> list[int]:
    """Sends drawn parts, and checks what comes; returns the collectives of each step."""
    rank = group.rank()
    transport = IdTransport(group, rank, STREAMS, weighted)
    gpus = GpuTransport(group, group, rank, STREAMS, weighted)
    counts = []
    for seed, step in enumerate(steps):
        parts = [part_of(source, *size, seed, weighted) for source, size in enumerate(step)]
        with count_collectives() as counter:
            if as_on_gpus:
                header = header_of(parts[rank])
                received = gpus.exchange_headers(header)
                arrived = gpus.start(gpus.pack(parts[rank], header.tolist(), received)).wait()
            else:
                delivery = transport.start(header_of(parts[rank]), parts[rank])
                received = delivery.headers()
                arrived = delivery.ids()
        counts.append(counter["all_to_all"])
        expected = [parts_for(part)[rank] for part in parts]
        assert [header[BATCH] for header in received] == [batch for batch, _ in step]
        assert [header[VALUES] for header in received] == [part.values.numel() for part in expected]
        assert torch.equal(arrived.lengths, torch.cat([part.lengths.reshape(-1) for part in expected]).to(torch.int32))
        assert torch.equal(arrived.values, torch.cat([part.values for part in expected]))
        if weighted:
            assert torch.equal(arrived.weights, torch.cat([part.weights for part in expected]))
    return counts


def parts_for(part: Ids) -> list[Ids]:
    lengths = part.lengths.split(STREAMS)
    sizes = [int(each.sum()) for each in lengths]
    weights = [None] * len(STREAMS) if part.weights is None else part.weights.split(sizes)
    return [Ids(*each) for each in zip(lengths, part.values.split(sizes), weights, strict=True)]


def header_of(part: Ids) -> torch.Tensor:
    header = torch.zeros(len(STREAMS), GROUPS, dtype=torch.int64)
    header[:, VALUES] = torch.tensor([each.values.numel() for each in parts_for(part)])
    header[:, BATCH] = part.lengths.shape[1]
    return header


sizes = st.tuples(st.one_of(st.integers(0, 3), st.integers(0, 300)), st.integers(0, 5))


@FREE
@given(st.lists(st.lists(sizes, min_size=3, max_size=3), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_any_sizes_arrive_whole_and_all_ranks_count_the_same(steps: Any, weighted: bool, as_on_gpus: bool) -> None:
    first, *others = on_ranks(3, send, steps, weighted, as_on_gpus)
    assert all(counts == first for counts in others)
    assert set(first) <= ({1} if as_on_gpus else {1, 2})  # sizes, on the hosts, are counted apart


def test_a_second_exchange_only_where_parts_outgrow_what_was_seen() -> None:
    def counts(*batches: int) -> list[int]:
        return on_ranks(3, send, [[(batch, 4)] * 3 for batch in batches], False)[0]

    assert counts(200, 200, 201, 5, 200, 400, 400) == [2, 1, 1, 1, 1, 2, 1]
    assert counts(0, 0, 10, 10) == [1, 1, 2, 1]
    assert counts(1000, *[1] * 50, 1000) == [2, *[1] * 50, 2]  # what is not used is given back


def send_sized(group: dist.ProcessGroup, counts: list[int]) -> list[int]:
    """Batches of 64 examples whose part for rank 0 has so many ids; returns the collectives of each."""
    transport = IdTransport(group, group.rank(), STREAMS, False)
    collectives = []
    for count in counts:
        lengths = torch.zeros(3, 64, dtype=torch.int64)
        lengths[0, 0], lengths[2, 0] = count, 64
        part = Ids(lengths, torch.arange(count + 64), None)
        with count_collectives() as counter:
            delivery = transport.start(header_of(part), part)
            delivery.headers()
            values = delivery.ids().values.tolist()
            assert group.rank() != 0 or values == list(range(count)) * 3
        collectives.append(counter["all_to_all"])
    return collectives


def test_a_part_that_just_fills_what_was_foreseen_is_sent_once() -> None:
    """512 bytes of lengths and 64 ids are 1024 bytes; 1280 are then foreseen, which 96 ids fill and 97 do not."""
    assert on_ranks(3, send_sized, [64, 96])[0] == [2, 1]
    assert on_ranks(3, send_sized, [64, 97])[0] == [2, 2]


KINDS = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE]


def collection(kind: ShardingType, sequence: bool, weighted: bool) -> Any:
    config = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = [config(name=f"t{n}", num_embeddings=40 + n, embedding_dim=8, feature_names=[f"f{n}"]) for n in range(3)]
    plan = {t.name: cut(t, kind, [n % 2] if kind is KINDS[0] else [0, 1]) for n, t in enumerate(tables)}  # type: ignore[arg-type]
    if sequence:
        return EmbeddingCollection(tables, seed=1), plan  # type: ignore[arg-type]
    return EmbeddingBagCollection(tables, is_weighted=weighted, seed=1), plan  # type: ignore[arg-type]


def step_through(
    group: dist.ProcessGroup, kind: ShardingType, sequence: bool, weighted: bool, dedup: bool, steps: Any
) -> list[tuple[bool, int]]:
    """Looks up, in training and in evaluation, and checks against the plain module; no row changes."""
    module, plan = collection(kind, sequence, weighted)
    sharder: Any = EmbeddingCollectionSharder if sequence else EmbeddingBagCollectionSharder
    env = ShardingEnv.from_process_group(group)
    sharded = sharder({"learning_rate": 0.0}, dedup=dedup).shard(module, plan, env, CPU)
    configs = module.embedding_configs() if sequence else module.embedding_bag_configs()
    counts = []
    for seed, (train, batches, bad) in enumerate(steps):
        generator = torch.Generator().manual_seed(10 * seed + group.rank())
        kjt = draw_kjt(generator, configs, batches[group.rank()], 4, weighted)
        spoil = bad and group.rank() == 1 and kjt.values().numel() > 0
        if spoil:
            kjt.values()[0] = -1
        with count_collectives() as counter, torch.set_grad_enabled(train):
            try:
                out, expected = sharded(kjt).wait(), None if spoil else module(kjt)
            except ValueError:
                counts.append((train, -counter["all_to_all"]))
                continue
            got = [jt.values() for jt in out.values()] if sequence else [out.values()]
            if train:
                sum(part.sum() for part in got).backward()  # type: ignore[union-attr]
        wanted = [jt.values() for jt in expected.values()] if sequence else [expected.values()]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        counts.append((train, counter["all_to_all"]))
    return counts


drawn_steps = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.one_of(st.integers(0, 2), st.integers(0, 150)), min_size=2, max_size=2),
        st.integers(0, 5).map(lambda n: n == 0),
    ),
    min_size=1,
    max_size=6,
)


@FREE
@given(
    kind=st.sampled_from(KINDS), sequence=st.booleans(), weighted=st.booleans(), dedup=st.booleans(), steps=drawn_steps
)
def test_batches_grow_and_shrink_between_training_and_evaluation(
    kind: ShardingType, sequence: bool, weighted: bool, dedup: bool, steps: Any
) -> None:
    first, second = on_ranks(2, step_through, kind, sequence, weighted and not sequence, dedup, steps)
    assert first == second
    assert all(count in ((3, 4) if train else (2, 3)) or count == -1 for train, count in first)
