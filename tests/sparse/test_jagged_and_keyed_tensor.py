"""JaggedTensor and KeyedTensor against plain lists, and what they refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree

from rayrec.sparse import jagged_tensor as home
from rayrec.torchrec.sparse import JaggedTensor, KeyedTensor  # with TorchRec's methods

quick = settings(max_examples=50)
lists_of_ids = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=5)


def weights_of(lists: list[list[int]]) -> list[list[float]]:
    return [[v / 4 + 1 for v in part] for part in lists]


def jagged(lists: list[list[int]], weighted: bool, by_offsets: bool = False) -> JaggedTensor:
    lengths = torch.tensor([len(part) for part in lists])
    return JaggedTensor(
        values=torch.tensor([v for part in lists for v in part], dtype=torch.int64),
        weights=torch.tensor([w for part in weights_of(lists) for w in part]) if weighted else None,
        lengths=None if by_offsets else lengths,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) if by_offsets else None,
    )


@quick
@given(lists_of_ids, st.booleans(), st.booleans())
def test_a_jagged_tensor_holds_what_was_put_in(lists: list[list[int]], weighted: bool, by_offsets: bool) -> None:
    jt = jagged(lists, weighted, by_offsets)
    leaves, spec = pytree.tree_flatten(jt)
    dense = JaggedTensor.from_dense(jt.to_dense(), jt.to_dense_weights() if weighted else None)
    for other in (jt, pytree.tree_unflatten(leaves, spec), jt.to("cpu"), pickle.loads(pickle.dumps(jt)), dense):
        assert [part.tolist() for part in other.to_dense()] == lists
        assert other.lengths().tolist() == [len(part) for part in lists]
        assert other.offsets().tolist() == [sum(len(p) for p in lists[:n]) for n in range(len(lists) + 1)]
        if weighted:
            assert [part.tolist() for part in other.to_dense_weights()] == weights_of(lists)
    text = f'    "values": {lists},\n    "weights": {weights_of(lists)}' if weighted else f"    {lists}"
    assert str(jt) == "JaggedTensor({\n" + text + "\n})\n"


@quick
@given(lists_of_ids, st.one_of(st.none(), st.integers(0, 5)), st.booleans())
def test_padding_and_back(lists: list[list[int]], width: int | None, weighted: bool) -> None:
    jt = jagged(lists, weighted)
    wide = max(len(part) for part in lists) if width is None else width
    padded = [(part + [-1] * wide)[:wide] for part in lists]
    assert jt.to_padded_dense(width, padding_value=-1).tolist() == padded
    if weighted:
        expected = [(part + [0.5] * wide)[:wide] for part in weights_of(lists)]
        assert jt.to_padded_dense_weights(width, padding_value=0.5).tolist() == expected
    lengths = torch.tensor([min(len(part), wide) for part in lists])
    back = JaggedTensor.from_dense_lengths(torch.tensor(padded).view(len(lists), wide), lengths)
    assert [part.tolist() for part in back.to_dense()] == [part[:wide] for part in lists]


def test_vectors_may_be_jagged_too() -> None:
    vectors = torch.arange(12.0).view(3, 4)
    jt = JaggedTensor(vectors, lengths=torch.tensor([1, 0, 2]))
    assert [part.shape for part in jt.to_dense()] == [(1, 4), (0, 4), (2, 4)]
    padded = jt.to_padded_dense()
    assert padded.shape == (3, 2, 4)
    assert torch.equal(padded[2], vectors[1:]) and not padded[1].any()
    assert torch.equal(JaggedTensor.from_dense_lengths(padded, jt.lengths()).values(), vectors)


def test_empty_jagged_tensors_and_wrong_ones() -> None:
    nothing = JaggedTensor.empty(is_weighted=True)
    assert nothing.to_dense() == [] and nothing.weights().numel() == 0
    assert nothing.to_padded_dense().shape == (0, 0)
    with pytest.raises(ValueError, match="needs lengths or offsets"):
        JaggedTensor(torch.arange(2))
    with pytest.raises(ValueError, match="3 weights for 2 values"):
        JaggedTensor(torch.arange(2), torch.ones(3), torch.tensor([2]))
    with pytest.raises(ValueError, match="has no weights"):
        JaggedTensor(torch.arange(2), lengths=torch.tensor([2])).weights()
    with pytest.raises(ValueError, match="needs at least one example"):
        JaggedTensor.from_dense([])


def test_all_types_live_where_the_tutorials_import_them_from() -> None:
    for kind in (home.JaggedTensor, home.KeyedJaggedTensor, home.KeyedTensor):
        assert kind.__module__ == "rayrec.sparse.jagged_tensor"


@st.composite
def keyed(draw: Any, prefix: str = "k") -> tuple[KeyedTensor, dict[str, torch.Tensor]]:
    rows = 3
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    blocks = {f"{prefix}{n}": torch.rand(rows, width, generator=generator) for n, width in enumerate(widths)}
    return KeyedTensor.from_tensor_list(list(blocks), list(blocks.values())), blocks


@quick
@given(keyed())
def test_a_keyed_tensor_gives_back_its_blocks(drawn: tuple[KeyedTensor, dict[str, torch.Tensor]]) -> None:
    kt, blocks = drawn
    leaves, spec = pytree.tree_flatten(kt)
    for other in (kt, pytree.tree_unflatten(leaves, spec), kt.to("cpu"), pickle.loads(pickle.dumps(kt))):
        assert other.keys() == list(blocks)
        assert other.length_per_key() == [block.shape[1] for block in blocks.values()]
        assert other.offset_per_key()[-1] == other.values().shape[1]
        assert other.key_dim() == 1
        for key, block in other.to_dict().items():
            assert torch.equal(block, blocks[key]) and torch.equal(other[key], blocks[key])
    lines = ",\n".join(f'    "{key}": {block.tolist()}' for key, block in blocks.items())
    assert str(kt) == "KeyedTensor({\n" + lines + "\n})\n"


@quick
@given(keyed("a"), keyed("b"), st.data())
def test_regrouping_picks_blocks_from_all(first: Any, second: Any, data: Any) -> None:
    (kt_a, blocks_a), (kt_b, blocks_b) = first, second
    blocks = {**blocks_a, **blocks_b}
    groups = data.draw(
        st.lists(st.lists(st.sampled_from(list(blocks)), min_size=1, max_size=4), min_size=1, max_size=3)
    )
    expected = [torch.cat([blocks[key] for key in group], dim=1) for group in groups]
    for found, wanted in zip(KeyedTensor.regroup([kt_a, kt_b], groups), expected, strict=True):
        assert torch.equal(found, wanted)
    names = [f"group {n}" for n in range(len(groups))]
    named = KeyedTensor.regroup_as_dict([kt_a, kt_b], groups, names)
    assert list(named) == names and all(torch.equal(named[n], e) for n, e in zip(names, expected, strict=True))


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    old, new = (KeyedTensor(["k"], [2], torch.full((1, 2), value)) for value in (1.0, 2.0))
    assert KeyedTensor.regroup([old, new], [["k"]])[0].tolist() == [[2.0, 2.0]]


def test_blocks_are_given_in_the_order_that_an_exported_model_takes() -> None:
    blocks = {"a": torch.ones(2, 1), "b": torch.zeros(2, 2)}
    _, spec = pytree.tree_flatten(KeyedTensor.from_tensor_list(list(blocks), list(blocks.values())))
    other = KeyedTensor.from_tensor_list(["b", "a"], [blocks["b"], blocks["a"]])
    (values,) = tree_flatten_spec(other, spec)
    assert torch.equal(values, torch.cat(list(blocks.values()), dim=1))
    with pytest.raises(ValueError, match=r"the model takes blocks \{'a': 1, 'b': 2\}, not \{'a': 1\}"):
        tree_flatten_spec(KeyedTensor(["a"], [1], blocks["a"]), spec)


def test_a_keyed_tensor_without_keys() -> None:
    for empty in (KeyedTensor([], [], torch.empty(0)), KeyedTensor.from_tensor_list([], [])):
        assert (empty.keys(), empty.to_dict(), str(empty)) == ([], {}, "KeyedTensor()\n")


def test_wrong_keyed_tensors_are_named() -> None:
    with pytest.raises(ValueError, match=r"1 keys with widths \[2\] do not fit a tensor of shape \[1, 3\]"):
        KeyedTensor(["a"], [2], torch.ones(1, 3))
    kt = KeyedTensor(["a"], [3], torch.ones(1, 3))
    with pytest.raises(KeyError, match="no key 'b'"):
        kt["b"]
    with pytest.raises(KeyError, match="no key 'b'"):
        KeyedTensor.regroup([kt], [["b"]])
    with pytest.raises(ValueError, match="1 names for 2 groups"):
        KeyedTensor.regroup_as_dict([kt], [["a"], ["a"]], ["x"])
    assert str(KeyedTensor([], [], torch.ones(1, 0))) == "KeyedTensor()\n"
