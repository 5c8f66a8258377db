"""Ids that are on their way before `forward` asks for them: found by the very object, oldest first, each once."""

from __future__ import annotations

import itertools

import torch

from rayrec.distributed.sharding.ahead import IdsAhead
from rayrec.sparse import KeyedJaggedTensor


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor([1]), lengths=torch.tensor([1]))


def test_what_was_begun_is_taken_once_the_oldest_first() -> None:
    numbers = itertools.count()
    start = lambda features: next(numbers)  # noqa: E731
    ahead: IdsAhead[int] = IdsAhead()
    one, other = kjt(), kjt()
    for features in (one, other, one):
        ahead.begin(features, start)
    assert [ahead.take(features, start) for features in (one, one, other)] == [0, 2, 1]
    assert ahead.take(one, start) == 3  # nothing is left: begun now


def test_ids_begun_for_evaluation_are_not_trained_on() -> None:
    numbers = itertools.count()
    start = lambda features: next(numbers)  # noqa: E731
    ahead: IdsAhead[int] = IdsAhead()
    features = kjt()
    with torch.no_grad():
        ahead.begin(features, start)
    assert ahead.take(features, start) == 1
    with torch.no_grad():
        assert ahead.take(features, start) == 0


def test_what_is_dropped_was_not_taken_before() -> None:
    start = lambda features: 0  # noqa: E731
    ahead: IdsAhead[int] = IdsAhead()
    first, second, third = (ahead.begin(kjt(), start) for _ in range(3))
    ahead.take(first.features, start)
    assert [ahead.drop(begun) for begun in (first, second, second)] == [False, True, False]
    ahead.clear()
    assert not ahead.drop(third)
