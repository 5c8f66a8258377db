"""Elastic runs: how many workers there is room for, and when a run grows. Nodes come and go in `test_chaos.py`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.train import ConfigError, parse_config
from rayrec.train.driver.elastic import FIRST_WAIT_S, LONGEST_WAIT_S, SETTLED_S, Growth, room_for
from tests.train.small import raw_config


@pytest.mark.parametrize("wrong", [[2], [0, 2], [3, 2], [1, 2, 3]])
def test_least_and_most_are_checked(wrong: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_workers"):
        parse_config(raw_config(Path("/nowhere"), trainer__num_workers=wrong))


def test_the_batch_is_dealt_to_the_most_workers() -> None:
    with pytest.raises(ConfigError, match="64 rows a step cannot be dealt to 65 workers"):
        parse_config(raw_config(Path("/nowhere"), trainer__num_workers=[1, 65]))
    trainer = parse_config(raw_config(Path("/nowhere"), trainer__num_workers=[1, 64])).trainer
    assert (trainer.least_workers, trainer.most_workers, trainer.elastic) == (1, 64, True)


@given(
    st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 9), "GPU": st.integers(0, 3)}), max_size=5),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.booleans(),
)
def test_room_is_counted_node_by_node(nodes: list[dict[str, int]], cpus: float, gpus: bool) -> None:
    each = {"CPU": cpus, **({"GPU": 1.0} if gpus else {})}
    placed = 0
    for node in nodes:
        free = dict(node)
        while all(free[name] >= amount for name, amount in each.items()):
            free = {name: free[name] - each.get(name, 0) for name in free}
            placed += 1
    assert room_for(each, nodes, 10_000) == placed
    assert room_for(each, nodes, 2) == min(2, placed)


class Running(NamedTuple):
    """An attempt, by its number and workers."""

    attempt: int
    world_size: int


def test_growth_is_asked_for_once_an_attempt_and_more_rarely_where_it_brought_none() -> None:
    growth = Growth()
    assert not growth.due(Running(0, 0), 4, "ab", 1e9), "before the workers have begun"
    assert not growth.due(Running(1, 2), 4, "ab", 1.0)
    assert not growth.due(Running(1, 2), 4, "ab", FIRST_WAIT_S), "both nodes were there when it began"
    assert not growth.due(Running(1, 2), 2, "ab", 100.0), "there is no more room"
    assert growth.due(Running(1, 2), 4, "ab", 1.0 + FIRST_WAIT_S)
    assert not growth.due(Running(1, 2), 4, "ab", 102.0), "asked already"
    assert not growth.due(Running(2, 2), 4, "ab", 110.0)
    assert growth.wait_s == 2 * FIRST_WAIT_S, "the new attempt is as small as the one before"
    assert not growth.due(Running(2, 2), 4, "ab", 110.0 + FIRST_WAIT_S)
    assert growth.due(Running(2, 2), 4, "ab", 110.0 + 2 * FIRST_WAIT_S)
    assert not growth.due(Running(3, 4), 4, "ab", 400.0)
    assert growth.wait_s == FIRST_WAIT_S
    for attempt in range(4, 40):
        growth.due(Running(attempt, 1), 4, "ab", 1e6 * attempt)
        assert growth.due(Running(attempt, 1), 4, "ab", 1e6 * attempt + LONGEST_WAIT_S)
    assert growth.wait_s == LONGEST_WAIT_S


def test_a_node_that_came_is_room_as_soon_as_ray_counts_it() -> None:
    growth = Growth()
    assert not growth.due(Running(1, 1), 2, "ab", 10.0)
    assert not growth.due(Running(1, 1), 2, "ab", 20.0)
    assert not growth.due(Running(1, 1), 2, "abc", 21.0), "it has only come"
    assert growth.due(Running(1, 1), 2, "ac", 21.0 + SETTLED_S), "b is told dead, c is new"
    assert not growth.due(Running(2, 2), 2, "ac", 50.0)
