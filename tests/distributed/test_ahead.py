"""Ids that are on their way before `forward` asks for them: found by the very object, oldest first, each once."""

from __future__ import annotations

import itertools

import torch

from rayrec.distributed.comm.awaitable import NoWait
from rayrec.distributed.ids.input_dist import InputDist
from rayrec.sparse import KeyedJaggedTensor


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor([1]), lengths=torch.tensor([1]))


def counting() -> InputDist[int, int]:
    """What is started gets the next number."""
    numbers = itertools.count()
    return InputDist(torch.device("cpu"), lambda features: next(numbers), NoWait)


def test_what_was_begun_is_taken_once_the_oldest_first() -> None:
    ahead = counting()
    one, other = kjt(), kjt()
    for features in (one, other, one):
        ahead.begin(features)
    assert [ahead.take(features).wait() for features in (one, one, other)] == [0, 2, 1]
    assert ahead.take(one).wait() == 3  # nothing is left: begun now


def test_ids_begun_for_evaluation_are_not_trained_on() -> None:
    ahead, features = counting(), kjt()
    with torch.no_grad():
        ahead.begin(features)
    assert ahead.take(features).wait() == 1
    with torch.no_grad():
        assert ahead.take(features).wait() == 0


def test_what_is_dropped_was_not_taken_before() -> None:
    ahead = counting()
    first, second, third = (ahead.begin(kjt()) for _ in range(3))
    ahead.take(first.features)
    assert [ahead.drop(begun) for begun in (first, second, second)] == [False, True, False]
    ahead.clear()
    assert not ahead.drop(third)
