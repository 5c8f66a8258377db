"""The plan of a save: what each rank writes, when the plan is kept, and when ranks plan anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.checkpoint import CheckpointStore, Saving
from rayrec.checkpoint.contents import random_states, set_random_states
from rayrec.checkpoint.save_plan import Region, SavePlan, divide
from rayrec.distributed import EmbOptimType
from rayrec.distributed.comm import count_collectives
from tests.checkpoint.test_store import build, train
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def region(key: str, size: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    return Region(key, size, offsets, shape, 4)


@settings(max_examples=50)
@given(data=st.data(), world_size=st.integers(1, 8))
def test_every_number_is_written_by_one_rank_and_ranks_write_equally_much(data: Any, world_size: int) -> None:
    """Tables in shards of rows that several replicas may have, and tensors that all ranks have."""
    by_rank: list[list[Region]] = [[] for _ in range(world_size)]
    for number in range(data.draw(st.integers(0, 3))):
        edges = sorted(data.draw(st.sets(st.integers(1, 99), max_size=4)))
        for start, stop in zip([0, *edges], [*edges, 100], strict=True):
            for rank in data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                by_rank[rank].append(region(f"table/{number}", (100, 8), (start, 0), (stop - start, 8)))
    shared = [
        region(f"dense/{n}", (size,), (0,), (size,)) for n, size in enumerate(data.draw(st.lists(st.integers(0, 50))))
    ]
    for own in by_rank:
        own += shared
        data.draw(st.randoms()).shuffle(own)
    chosen = divide(by_rank)
    written = [own[position] for own, positions in zip(by_rank, chosen, strict=True) for position in positions]
    assert len(set(written)) == len(written) and set(written) == {region for own in by_rank for region in own}
    loads = [sum(own[i].nbytes for i in positions) for own, positions in zip(by_rank, chosen, strict=True)]
    largest = max((region.nbytes for region in written), default=0)
    tables = [
        sum(own[i].nbytes for i in places if own[i] not in shared) for own, places in zip(by_rank, chosen, strict=True)
    ]
    assert max(loads) <= max(max(tables), sum(loads) / world_size + largest)


@pytest.mark.parametrize(
    "by_rank, text",
    [
        ([[region("a", (4,), (0,), (3,))]], "have 3 of 4 numbers"),
        ([[region("a", (4,), (0,), (2,))], [region("a", (4,), (0,), (4,))]], "have 6 of 4 numbers"),
        ([[region("a", (4,), (2,), (3,))]], "is outside of"),
        ([[region("a", (4,), (0,), (4,))], [region("a", (5,), (0,), (5,))]], "different shapes: .4,., .5,."),
    ],
)
def test_rectangles_that_do_not_make_up_a_tensor_are_refused(by_rank: list[list[Region]], text: str) -> None:
    with pytest.raises(ValueError, match=f"a: .*{text}"):
        divide(by_rank)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), draws=st.integers(0, 1300), normal=st.booleans())
def test_random_states_have_one_shape_whatever_was_drawn(seed: int, draws: int, normal: bool) -> None:
    kept = random_states(0, CPU)
    try:
        random.seed(seed)
        np.random.seed(seed)
        numbers = [random.random() for _ in range(draws)]
        np.random.random(draws)
        if normal:
            random.gauss(0, 1)
            np.random.normal()
        states = random_states(0, CPU)
        assert {key: state.shape for key, state in states.items()} == {key: state.shape for key, state in kept.items()}
        expected = random.random(), np.random.random(), random.gauss(0, 1)
        set_random_states(states, CPU)
        assert (random.random(), np.random.random(), random.gauss(0, 1)) == expected and len(numbers) == draws
    finally:
        set_random_states(kept, CPU)


def save_often(group: dist.ProcessGroup, root: str) -> list[tuple[bool, int]]:
    """(whether the ranks planned, the number of collectives) of each save, of a model whose state changes."""
    model, dense = build(group, "rw", EmbOptimType.EXACT_ADAGRAD, 1)
    store, saves = CheckpointStore(root), []
    extra = [torch.zeros(3), torch.zeros(3), torch.zeros(5), torch.zeros(5, dtype=torch.float64), torch.zeros(5)]
    for step in range(7):
        if step == 2:  # the dense optimizer allocates its state at the first step
            train(model, dense, group, range(1))
        random.seed(step)
        random.random()
        tensors = {"extra": extra[max(0, step - 2)]} if group.rank() == 0 else None
        with count_collectives() as counted:
            assert store.save_in_background(step, model, dense, Saving(tensors=tensors), group)
        saves.append((counted["gather_object"] > 0, counted.total()))
        store.finish(group)
        assert [outcome.error for outcome in store.ended()] == [None]
    return saves


def test_ranks_plan_anew_only_when_the_state_of_one_changes(tmp_path: Path) -> None:
    for saves in on_ranks(3, save_often, str(tmp_path)):
        assert [planned for planned, _ in saves] == [True, False, True, False, True, True, True]
        assert [number for planned, number in saves if not planned] == [3, 3]
    store = CheckpointStore(tmp_path)
    for checkpoint, rows in zip(store.all(), [3, 3, 3, 3, 5, 5, 5], strict=True):
        assert not store.damages(checkpoint)
        with store.reader(checkpoint) as reader:
            assert reader.tensor("tensor/extra").shape == (rows,)
            assert any(key.startswith("dense_state/") for key in reader.index.tensors) == (checkpoint.step >= 2)


def plan_twice(group: dist.ProcessGroup) -> list[str]:
    """A plan that failed is not kept: the one before is not used in its place."""
    from rayrec.checkpoint.writer import Item

    plan, rank = SavePlan(), group.rank()
    whole = [Item("a", (4,), (0,), torch.zeros(4))]
    short = [Item("a", (4,), (0,), torch.zeros(3))]
    plan.renew(whole, group)
    told = [f"{plan.fits(whole)} {len(plan.work(whole).items)}"]
    with pytest.raises(ValueError, match="a: the rectangles of all ranks have 3 of 4 numbers"):
        plan.renew(short, group)
    told.append(f"{plan.fits(whole)} {plan.fits(short)}")
    plan.renew(whole if rank else [], group)
    return [*told, f"{len(plan.work(whole).items)} {sorted(plan.work(whole).keys)}"]


def test_a_failed_plan_is_not_kept() -> None:
    first, second = on_ranks(2, plan_twice)
    assert first == ["True 1", "False False", "0 ['a']"]
    assert second == ["True 0", "False False", "1 []"]
