"""With the pipeline a loop computes the same numbers as without."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    TrainPipeline,
    comm,
)
from rayrec.distributed.pipeline import _Started
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut, draw_kjt
from tests.distributed.test_model_parallel import FUSED, plans, tables
from tests.ranks import on_ranks

WORLD = 2
SIZES = [(4, 4), (5, 2), (0, 3), (1, 0), (4, 6)]  # examples of each rank, step by step


class Copying(nn.Module):
    """Calls its collection with features that it has made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = EmbeddingBagCollection(tables(), seed=5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        given = batch.sparse
        made = KeyedJaggedTensor(given.keys(), given.values(), lengths=given.lengths(), stride=given.stride())
        logits = self.embedding_bags(made).values().sum(1)
        return logits.sum(), logits


class Sequences(nn.Module):
    """Without pooling."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(
                name=t.name, num_embeddings=t.num_embeddings, embedding_dim=16, feature_names=t.feature_names
            )
            for t in tables()
        ]
        self.embedding_bags = EmbeddingCollection(configs, seed=5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.embedding_bags(batch.sparse)
        logits = torch.cat([vectors[key].values() for key in batch.sparse.keys()]).sum(1)
        return logits.square().sum(), logits


def dlrm() -> nn.Module:
    torch.manual_seed(5)
    return DLRM(tables(), 3, dense_arch=[16, 16], over_arch=[16, 1], tables_device="cpu", seed=5)


def shard(group: dist.ProcessGroup, model: nn.Module) -> DistributedModelParallel:
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embedding_bags": plans(WORLD)["mixed"]}),
        sharders=[EmbeddingBagCollectionSharder(FUSED), EmbeddingCollectionSharder(FUSED)],
    )


def drawn(rank: int) -> list[Batch]:
    generator, batches = torch.Generator().manual_seed(1), []
    for sizes in SIZES:
        for number, size in enumerate(sizes):
            sparse, dense = draw_kjt(generator, tables(), size, 3), torch.rand(size, 3, generator=generator)
            if number == rank:
                batches.append(Batch(dense, sparse, (dense.sum(1) > 1.5).float()))
    return batches


def step(model: DistributedModelParallel, dense: torch.optim.Optimizer | None, batch: Batch) -> torch.Tensor:
    loss, logits = model(batch)
    (loss if batch.rows else logits.sum() * 0.0).backward()
    if dense is not None:
        dense.step()
        dense.zero_grad()
    return logits.detach().clone()


def train(group: dist.ProcessGroup, make: Any, ahead: bool) -> Any:
    """Logits and collectives of every step, and the shards of this rank and its dense parameters afterwards."""
    model = shard(group, make())
    others = list(model.dense_parameters().values())
    dense = torch.optim.Adam(others, lr=0.01) if others else None
    batches: Any = drawn(group.rank())
    logits, counts = [], []
    with comm.count_collectives() as counted:
        for batch in TrainPipeline(model).ahead(batches) if ahead else batches:
            logits.append(step(model, dense, batch))
            counts.append(sum(counted.values()))
    weights = [item.weight.clone() for table in model.tables().values() for item in table.local]
    return logits, [*weights, *(p.detach() for p in others)], counts


@pytest.mark.parametrize("make", [dlrm, Sequences, Copying])
def test_every_number_is_that_of_the_plain_loop(make: Any) -> None:
    plain = on_ranks(WORLD, train, make, False)
    for (logits, weights, counts), expected in zip(on_ranks(WORLD, train, make, True), plain, strict=True):
        assert all(torch.equal(got, want) for got, want in zip(logits, expected[0], strict=True))
        assert all(torch.equal(got, want) for got, want in zip(weights, expected[1], strict=True))
        wasted = counts[-1] - expected[2][-1]
        if make is Copying:  # which the first step has shown, when the second batch's ids had been begun
            assert wasted == 2
            assert counts[-1] - counts[1] == expected[2][-1] - expected[2][1]
        else:
            assert 0 <= wasted <= 2  # ids that began before room for them could be foreseen take a second exchange
            assert counts[0] > expected[2][0]  # the next batch's had begun


def pulled_when_stepping(group: dist.ProcessGroup) -> list[int]:
    model, pulled = shard(group, dlrm()), []

    def source() -> Iterator[Batch]:
        for number, batch in enumerate(drawn(group.rank())):
            pulled.append(number)
            yield batch

    seen = []
    for batch in TrainPipeline(model).ahead(source()):
        seen.append(len(pulled))
        step(model, None, batch)
    return seen


def test_the_next_batch_is_begun_before_each_is_handed_out() -> None:
    assert on_ranks(WORLD, pulled_when_stepping) == [[2, 3, 4, 5, 5]] * WORLD


def until_an_error(group: dist.ProcessGroup, bad: str) -> tuple[int, str, list[torch.Tensor]]:
    """Steps until the third batch cannot be read, or has an id outside its table on rank 0."""
    model = shard(group, dlrm())

    def source() -> Iterator[Batch]:
        for number, batch in enumerate(drawn(group.rank())):
            if number == 2 and bad == "reading":
                raise OSError("the disk is gone")
            if number == 2 and group.rank() == 0:
                keys = batch.sparse.keys()
                sparse = KeyedJaggedTensor(keys, torch.full((len(keys),), 99), lengths=torch.ones(len(keys), dtype=int))
                batch = Batch(torch.zeros(1, 3), sparse, torch.zeros(1))
            yield batch

    steps = 0
    try:
        for batch in TrainPipeline(model).ahead(source()):
            step(model, None, batch)
            steps += 1
    except (OSError, ValueError) as error:
        return steps, str(error), [step(model, None, batch) for batch in drawn(group.rank())]
    raise AssertionError("no error")


@pytest.mark.parametrize("bad", ["reading", "id"])
def test_an_error_comes_after_the_batches_before_it_and_leaves_the_model_usable(bad: str) -> None:
    first, second = on_ranks(WORLD, until_an_error, bad)
    assert (first[0], second[0]) == (2, 2)
    assert ("the disk is gone" if bad == "reading" else "id 99") in first[1]
    assert ("the disk is gone" if bad == "reading" else "rank 0") in second[1]
    assert all(logits.isfinite().all() for logits in (*first[2], *second[2]))


def stop_early(group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = shard(group, dlrm())
    for batch in TrainPipeline(model).ahead(drawn(group.rank())):
        step(model, None, batch)
        break
    return [step(model, None, batch) for batch in drawn(group.rank())[1:]]


def go_on_plainly(group: dist.ProcessGroup) -> list[torch.Tensor]:
    model = shard(group, dlrm())
    return [step(model, None, batch) for batch in drawn(group.rank())][1:]


def test_a_loop_may_stop_early() -> None:
    for got, want in zip(on_ranks(WORLD, stop_early), on_ranks(WORLD, go_on_plainly), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def repeat_batches(group: dist.ProcessGroup, ahead: bool) -> list[torch.Tensor]:
    """The same object again and again, as a rank that has run out of rows goes on with; another one on rank 1."""
    model, batches = shard(group, dlrm()), drawn(group.rank())
    given = [batches[0]] * 4 if group.rank() == 0 else batches[:4]
    return [step(model, None, batch) for batch in (TrainPipeline(model).ahead(given) if ahead else given)]


def test_one_batch_may_come_several_times() -> None:
    for got, want in zip(on_ranks(WORLD, repeat_batches, True), on_ranks(WORLD, repeat_batches, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def score_then_train(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What was begun without gradients is not what a training step needs."""
    model, out = shard(group, dlrm()), []
    with torch.no_grad():
        for batch in TrainPipeline(model).ahead(drawn(group.rank())):
            with torch.enable_grad():
                out.append(step(model, None, batch))
    return out[1:]


def test_what_was_begun_without_gradients_is_begun_again_with_them() -> None:
    for got, want in zip(on_ranks(WORLD, score_then_train), on_ranks(WORLD, go_on_plainly), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def score(model: DistributedModelParallel, batch: Batch, mode: str) -> torch.Tensor:
    """Logits of the model in evaluation, under `torch.no_grad` or `torch.inference_mode`."""
    model.eval()
    with getattr(torch, mode)():
        logits: torch.Tensor = model(batch)[1].clone()
    model.train()
    return logits


def evaluate_or_skip(group: dist.ProcessGroup, second: str, ahead: bool) -> tuple[list[torch.Tensor], int]:
    """Logits and collectives of steps of which the second one does not train."""
    model, out = shard(group, dlrm()), []
    ids_ahead = model.sharded_modules()["embedding_bags"].ids_ahead
    batches, waiting = drawn(group.rank()), []
    with comm.count_collectives() as counted:
        for number, batch in enumerate(TrainPipeline(model).ahead(batches) if ahead else batches):
            if number == 1 and second == "skip":
                continue
            if number == 1:
                out.append(score(model, batch, second))
            else:
                out.append(step(model, None, batch))
            waiting.append(len(ids_ahead._ahead))
    assert not ids_ahead._ahead
    if ahead:
        assert waiting == [1] * (len(waiting) - 1) + [0]  # the next batch, and no other
    return out, sum(counted.values())


@pytest.mark.parametrize("second", ["skip", "no_grad", "inference_mode"])
def test_a_batch_evaluated_or_skipped_leaves_sending_ahead_on(second: str) -> None:
    plain = on_ranks(WORLD, evaluate_or_skip, second, False)
    for (out, count), (expected, least) in zip(on_ranks(WORLD, evaluate_or_skip, second, True), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert count == least + (second == "skip")  # the ids of the batch that was skipped


def evaluate_and_train(group: dist.ProcessGroup, mode: str, ahead: bool) -> tuple[list[torch.Tensor], int]:
    """Logits of an evaluation, whose batches are begun with gradients enabled, and of the steps after it; how many
    collectives the evaluation takes."""
    model = shard(group, dlrm())
    dense = torch.optim.Adam(list(model.dense_parameters().values()), lr=0.01)
    batches = drawn(group.rank())
    step(model, dense, batches[0])
    with comm.count_collectives() as counted:
        out = [score(model, batch, mode) for batch in (TrainPipeline(model).ahead(batches) if ahead else batches)]
    assert not model.sharded_modules()["embedding_bags"].ids_ahead._ahead
    return [*out, *(step(model, dense, batch) for batch in batches)], sum(counted.values())


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_evaluation_is_that_of_the_plain_loop_and_leaves_training_as_it_is(mode: str) -> None:
    plain = on_ranks(WORLD, evaluate_and_train, mode, False)
    for (out, count), (expected, least) in zip(on_ranks(WORLD, evaluate_and_train, mode, True), plain, strict=True):
        assert len(out) == 2 * len(SIZES) and all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert count == least  # every batch's ids are sent once


class Recording(TrainPipeline[int]):
    """Writes down what it does, as with a GPU."""

    def __init__(self, bad: int = -1) -> None:
        super().__init__()
        self.done: list[str] = []
        self._copies, self._bad = object(), bad  # type: ignore[assignment]

    def _start(self, batch: int) -> _Started[int]:
        self.done.append(f"start {batch}")
        if batch == self._bad:
            raise ValueError(f"batch {batch} is bad")
        return _Started(batch, None, {})

    def _send(self, item: _Started[int]) -> None:
        self.done.append(f"send {item.batch}")

    def run(self, batches: int) -> str:
        for batch in self.ahead(range(batches)):
            self.done.append(f"train {batch}")
        return ", ".join(self.done)


def test_on_a_gpu_ids_are_sent_before_the_batch_after_them_is_copied() -> None:
    assert Recording().run(3) == "start 0, send 0, start 1, send 1, start 2, train 0, send 2, train 1, train 2"
    assert Recording().run(1) == "start 0, send 0, train 0" and Recording().run(0) == ""
    failing = Recording(bad=2)
    with pytest.raises(ValueError, match="batch 2 is bad"):
        failing.run(4)
    assert failing.done[-2:] == ["train 0", "train 1"] and "start 3" not in failing.done


def test_the_next_item_is_begun_before_one_is_handed_out_and_an_error_waits_its_turn() -> None:
    begun: list[int] = []

    def begin(item: int) -> int:
        if item == 3:
            raise OSError("gone")
        begun.append(item)
        return 10 * item

    def ahead(items: list[int]) -> Iterator[int]:
        return TrainPipeline[int](move=begin).ahead(items)

    found = ahead([1, 2, 3])
    assert next(found) == 10 and begun == [1, 2]
    assert next(found) == 20
    with pytest.raises(OSError, match="gone"):
        next(found)
    assert list(ahead([1, 2])) == [10, 20] and list(ahead([])) == []


def alone(device: torch.device, ahead: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Rows and logits of a process without others."""
    tables_on = {t.name: replace(cut(t, ShardingType.TABLE_WISE, [0]), device=device.type) for t in tables()}
    plan = ShardingPlan({"embedding_bags": tables_on})
    model = DistributedModelParallel(dlrm(), env=ShardingEnv.from_local(1, 0), device=device, plan=plan)
    batches: Any = drawn(0)
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    rows, logits = [], []
    for batch in TrainPipeline(model).ahead(batches) if ahead else (batch.to(device) for batch in batches):
        rows.append(batch.rows)
        logits.append(step(model, None, batch))
    return rows, logits


def check_alone(device: torch.device) -> None:
    rows, logits = alone(device, ahead=True)
    assert rows == [sizes[0] for sizes in SIZES]
    torch.testing.assert_close(logits, alone(device, ahead=False)[1])


def test_one_process_needs_no_others() -> None:
    check_alone(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_to_a_gpu_run_ahead() -> None:
    check_alone(torch.device("cuda:0"))


def test_a_used_batch_is_freed_before_the_next_but_one_is_started() -> None:
    model = DistributedModelParallel(dlrm(), device=torch.device("cpu"))
    used: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def source() -> Iterator[Batch]:
        for seed in range(5):
            alive.append(sum(ref() is not None for ref in used))
            sparse = draw_kjt(torch.Generator().manual_seed(seed), tables(), 3, 2)
            yield Batch(dense=torch.rand(3, 3), sparse=sparse, label=torch.zeros(3))

    for batch in TrainPipeline(model).ahead(source()):
        used.append(weakref.ref(batch.dense))
        model(batch)[0].backward()
        del batch
    assert len(used) == 5 and not any(alive)
