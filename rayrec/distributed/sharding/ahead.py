"""Batches whose ids are on their way before the model is called with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from rayrec.distributed.awaitable import Awaitable
from rayrec.distributed.sharding.input_dist import PendingInput
from rayrec.sparse import KeyedJaggedTensor

T = TypeVar("T")
Start = Callable[[KeyedJaggedTensor], PendingInput[T]]


@dataclass(frozen=True, eq=False, slots=True)
class Begun(Generic[T]):
    """Ids on their way, for the features that they are of."""

    features: KeyedJaggedTensor
    trained: bool  # gradients were enabled
    ids: PendingInput[T]


class IdsAhead(Generic[T]):
    """What `input_dist` has begun before `forward`; features are known by being the same object.

    Ranks must begin, take and drop in the same order.
    """

    def __init__(self) -> None:
        self._begun: list[Begun[T]] = []

    def begin(self, features: KeyedJaggedTensor, input_dist: Start[T]) -> Begun[T]:
        begun = Begun(features, torch.is_grad_enabled(), input_dist(features))
        self._begun.append(begun)
        return begun

    def take(self, features: KeyedJaggedTensor, input_dist: Start[T]) -> Awaitable[T]:
        """What was begun for these features, each time once and the oldest first, or else begun now."""
        for begun in self._begun:
            if begun.features is features and begun.trained == torch.is_grad_enabled():
                self._begun.remove(begun)
                return begun.ids
        return input_dist(features)

    def drop(self, begun: Begun[T]) -> bool:
        """Forgets what was begun; whether nobody had taken it."""
        if begun not in self._begun:
            return False
        self._begun.remove(begun)
        return True

    def clear(self) -> None:
        """Forgets everything."""
        self._begun = []
