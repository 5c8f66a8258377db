"""A lazy result waits when it is used, and not when it is only looked at."""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed.collections.embedding import EmbeddingCollectionAwaitable
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionAwaitable
from rayrec.distributed.comm.awaitable import Deferred
from rayrec.sparse import JaggedTensor, KeyedTensor


def _never() -> KeyedTensor:
    raise AssertionError("waited")


def _bags() -> KeyedTensor:
    return KeyedTensor(["f"], [2], torch.ones(3, 2))


@pytest.mark.parametrize("kind", [EmbeddingBagCollectionAwaitable, EmbeddingCollectionAwaitable])
def test_looking_at_a_result_does_not_wait(kind: type[Deferred[object]]) -> None:
    out = kind(_never)
    assert kind.__name__ in repr(out) and kind.__name__ in f"{out} {out!s}"
    assert not hasattr(out, "shape") and not hasattr(out, "no_such_name") and not hasattr(out, "_private")
    with pytest.raises(AttributeError, match=f"{kind.__name__!r} object has no attribute 'shape'"):
        out.shape  # noqa: B018
    with pytest.raises(AssertionError, match="waited"):
        hasattr(out, "values")


def test_every_public_attribute_of_a_result_is_reached() -> None:
    bags, lists = _bags(), {"f": JaggedTensor(torch.ones(3, 2), lengths=torch.tensor([1, 2]))}
    for name in [name for name in dir(bags) if not name.startswith("_")]:
        assert hasattr(EmbeddingBagCollectionAwaitable(_bags), name)
    for name in [name for name in dir(lists) if not name.startswith("_")]:
        assert hasattr(EmbeddingCollectionAwaitable(lambda: lists), name)
    assert EmbeddingBagCollectionAwaitable(_bags).values().shape == (3, 2)
    assert list(EmbeddingCollectionAwaitable(lambda: lists).keys()) == ["f"]


def test_callbacks_may_change_the_type_of_a_result() -> None:
    out = EmbeddingBagCollectionAwaitable(_bags)
    out.callbacks.append(lambda bags: bags.values())  # type: ignore[arg-type, return-value]
    assert out.shape == (3, 2) and out.dtype == torch.float32
