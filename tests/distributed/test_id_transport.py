"""Ids between ranks: messages of any size arrive whole, and what goes wrong on one rank is raised on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ShardingEnv,
    ShardingType,
    comm,
)
from rayrec.distributed.ids.upload import Upload
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

CPU = torch.device("cpu")
FREE = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def message(source: int, target: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32) + 1000 * source + 100_000 * target


def exchange_all(group: dist.ProcessGroup, steps: list[list[int]], ahead: bool) -> None:
    """In each step rank r sends `step[r] * (target + 1)` words to each target; checks what arrives."""
    size, rank, waits = group.size(), group.rank(), []
    for step in steps:
        whole = [message(rank, target, step[rank] * (target + 1)) for target in range(size)]
        parts = [words.tensor_split(1 + target) for target, words in enumerate(whole)]  # each in some pieces
        waits.append(comm.exchange_messages(parts, group))
        if not ahead:
            check(waits.pop()(), step, rank)
    for wait, step in zip(waits, steps, strict=False):
        check(wait(), step, rank)


def check(arrived: list[torch.Tensor], step: list[int], rank: int) -> None:
    for source, words in enumerate(arrived):
        assert torch.equal(words, message(source, rank, step[source] * (rank + 1)))


sizes = st.one_of(st.integers(0, 3), st.integers(0, 40_000))


@FREE
@given(st.lists(st.lists(sizes, min_size=3, max_size=3), min_size=1, max_size=6), st.booleans())
def test_messages_arrive_whole_though_receivers_do_not_know_their_sizes(steps: Any, ahead: bool) -> None:
    on_ranks(3, exchange_all, steps, ahead)


def without_a_link(group: dist.ProcessGroup, steps: list[list[int]]) -> None:
    from unittest import mock

    from rayrec.distributed.comm import collectives

    with mock.patch.object(collectives, "link_of", lambda *_: None):
        exchange_all(group, steps, ahead=False)


def test_between_hosts_too() -> None:
    on_ranks(3, without_a_link, [[5, 0, 700], [0, 0, 0], [1, 2, 3]])


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
        with comm.count_collectives() as counter, torch.set_grad_enabled(train):
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
    assert all(count in ((3,) if train else (2,)) or count == -1 for train, count in first)


# -- errors of one rank


def sharded_bags(group: dist.ProcessGroup, weighted: bool = False) -> Any:
    module, plan = collection(ShardingType.ROW_WISE, False, weighted)
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    return sharder.shard(module, plan, ShardingEnv.from_process_group(group), CPU), module.embedding_bag_configs()


def torn(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Lengths that do not add up to the ids."""
    kjt.lengths()[0] += 1
    return kjt


def no_batch(kjt: KeyedJaggedTensor) -> Any:
    """Something that no check foresees."""
    return "a batch"


def go_on_after_an_error(group: dist.ProcessGroup, spoil: Any) -> list[str]:
    sharded, configs = sharded_bags(group)
    errors = []
    for step in range(3):
        kjt = draw_kjt(torch.Generator().manual_seed(step + 10 * group.rank()), configs, 8, 3)
        if step == 1 and group.rank() == 1:
            kjt = spoil(kjt)
        try:
            sharded(kjt).wait().values().sum().backward()
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("spoil, text", [(torn, "lengths add up to"), (no_batch, "AttributeError")])
def test_any_error_of_one_rank_is_raised_on_all_and_the_next_batch_is_the_next_on_all(spoil: Any, text: str) -> None:
    first, second = on_ranks(2, go_on_after_an_error, spoil)
    assert first[0] == second[0] == first[2] == second[2] == ""
    assert "rank 1 cannot process its batch" in first[1]
    assert text in second[1], "its own error"


def at_unlike_batches(group: dist.ProcessGroup) -> str:
    sharded, configs = sharded_bags(group)
    kjt = draw_kjt(torch.Generator().manual_seed(1), configs, 8, 3)
    if group.rank() == 1:
        sharded.ids_ahead.exchange.sender.pack_failure(ValueError("left out"))  # a batch that was packed and never sent
    try:
        sharded(kjt).wait()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_at_unlike_batches_are_named() -> None:
    first, second = on_ranks(2, at_unlike_batches)
    assert "rank 1 is at batch 2 of the collection of tables ['t0', 't1', 't2'], rank 0 is at batch 1" in first
    assert "rank 0 is at batch 1 of the collection of tables ['t0', 't1', 't2'], rank 1 is at batch 2" in second


# -- inference mode


def train_after_inference(group: dist.ProcessGroup, sequence: bool) -> list[float]:
    config: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = [config(name="t", num_embeddings=100, embedding_dim=32, feature_names=["f"])]
    module: Any = EmbeddingCollection(tables, seed=1) if sequence else EmbeddingBagCollection(tables, seed=1)
    sharder: Any = EmbeddingCollectionSharder if sequence else EmbeddingBagCollectionSharder
    plan = {"t": cut(tables[0], ShardingType.ROW_WISE, [0, 1])}
    sharded = sharder({"learning_rate": 0.1}).shard(module, plan, ShardingEnv.from_process_group(group), CPU)
    kjt = draw_kjt(torch.Generator().manual_seed(1), tables, 8192, 4)
    with torch.inference_mode():
        sharded(kjt).wait()
    sums = []
    for _ in range(2):
        out = sharded(kjt).wait()
        total = (out["f"].values() if sequence else out.values()).sum()
        total.backward()
        sums.append(total.item())
    return sums


@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
def test_an_evaluation_in_inference_mode_does_not_break_training(sequence: bool) -> None:
    for before, after in on_ranks(2, train_after_inference, sequence):
        assert after < before, "rows were updated"


def prepared_for_a_gpu(group: dist.ProcessGroup, by_id: bool) -> list[str]:
    """Three batches take the path of a GPU on the CPU. Preparing the second one fails on rank 1, after it was split."""
    module, plan = collection(ShardingType.ROW_WISE, by_id, False)
    sharder: Any = EmbeddingCollectionSharder if by_id else EmbeddingBagCollectionSharder
    sharded = sharder({"learning_rate": 0.1}).shard(module, plan, ShardingEnv.from_process_group(group), CPU)
    configs = module.embedding_configs() if by_id else module.embedding_bag_configs()
    ids, errors = sharded.ids_ahead, []
    exchange = ids.exchange
    exchange.on_cpu, exchange._host_group = False, group
    name, prepare = ("_find_units", exchange._find_units) if by_id else ("_words", exchange._words)

    def no_memory(*args: Any) -> Any:
        raise MemoryError("no memory for the batch")

    for number in range(3):
        setattr(exchange, name, no_memory if (number, group.rank()) == (1, 1) else prepare)
        kjt = draw_kjt(torch.Generator().manual_seed(number), configs, 8, 3)
        try:
            exchange.finish(exchange.send(ids.route(kjt), kjt))
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("by_id", [False, True])
def test_errors_of_preparing_a_batch_for_a_gpu_reach_every_rank(by_id: bool) -> None:
    first, second = on_ranks(2, prepared_for_a_gpu, by_id)
    assert first == ["", "ValueError: rank 1 cannot process its batch; see its error", ""]
    assert second == ["", "MemoryError: no memory for the batch", ""]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has pinned memory")
def test_a_batch_is_copied_without_pinned_memory() -> None:
    """Its sizes have been announced, so that an error would leave the other ranks waiting."""
    item = (torch.arange(5), [torch.ones(3, 2)])
    with pytest.warns(UserWarning, match="copied to the device from pageable memory, which is slower"):
        numbers, (ones,) = Upload(item).to(CPU)
    assert torch.equal(numbers, item[0]) and torch.equal(ones, item[1][0])
