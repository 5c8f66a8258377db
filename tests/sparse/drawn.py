"""Drawn batches, as tensors and as plain Python lists that say what the tensors should hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

Lists = list[list[int]]


@dataclass(frozen=True)
class Drawn:
    """`lists[key]` are a feature's lists; `weights` likewise or None; lengths of features differ where they vary."""

    lists: dict[str, Lists]
    weights: dict[str, list[list[float]]] | None
    kjt: KeyedJaggedTensor

    @property
    def keys(self) -> list[str]:
        return list(self.lists)


def flat(lists: list[list[Any]]) -> list[Any]:
    return [value for part in lists for value in part]


def tensors(
    lists: dict[str, Lists], weights: dict[str, list[list[float]]] | None, by_offsets: bool, **settings: Any
) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(part) for key in lists for part in lists[key]], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor([v for key in lists for v in flat(lists[key])], dtype=torch.int64),
        weights=None if weights is None else torch.tensor([w for key in weights for w in flat(weights[key])]),
        lengths=None if by_offsets else lengths,
        offsets=offsets if by_offsets else None,
        **settings,
    )


@st.composite
def batches(draw: Any, varying: bool = False, min_keys: int = 1, stride: int | None = None, prefix: str = "") -> Drawn:
    """A batch of up to 4 features and 4 examples; `varying`: each feature has a batch size of its own."""
    names = [f"{prefix}f{n}" for n in range(draw(st.integers(min_keys, 4)))]
    common = draw(st.integers(0, 4)) if stride is None else stride
    sizes = {name: draw(st.integers(0, 4)) if varying else common for name in names}
    one = st.lists(st.integers(0, 99), max_size=3)
    lists = {name: draw(st.lists(one, min_size=size, max_size=size)) for name, size in sizes.items()}
    weights = None
    if draw(st.booleans()):
        weights = {name: [[v / 4 + 1 for v in part] for part in parts] for name, parts in lists.items()}
    settings: dict[str, Any] = {"stride_per_key_per_rank": [[size] for size in sizes.values()]} if varying else {}
    if not varying:
        settings["stride"] = common
    return Drawn(lists, weights, tensors(lists, weights, draw(st.booleans()), **settings))


def as_lists(jt: JaggedTensor) -> Lists:
    return [part.tolist() for part in jt.to_dense()]


def holds(kjt: KeyedJaggedTensor, lists: dict[str, Lists], weights: dict[str, Any] | None) -> None:
    """Asserts that the tensor holds these lists, by every way of reading it."""
    assert kjt.keys() == list(lists)
    assert kjt.values().tolist() == [v for key in lists for v in flat(lists[key])]
    assert kjt.lengths().tolist() == [len(part) for key in lists for part in lists[key]]
    assert kjt.stride_per_key() == [len(lists[key]) for key in lists]
    assert kjt.length_per_key() == [len(flat(lists[key])) for key in lists]
    assert (kjt.weights_or_none() is None) == (weights is None)
    jts = kjt.to_dict()
    for key, parts in lists.items():
        assert as_lists(jts[key]) == as_lists(kjt[key]) == parts
        assert kjt[key].offsets()[0] == 0
        if weights is not None:
            assert [part.tolist() for part in kjt[key].to_dense_weights()] == weights[key]
