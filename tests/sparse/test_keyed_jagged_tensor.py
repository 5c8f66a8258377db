"""KeyedJaggedTensor against plain lists: every way in, every way out, every reshaping, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree

from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor  # with TorchRec's methods
from rayrec.torchrec.sparse.jagged_tensor_validator import validate
from tests.sparse.drawn import Drawn, batches, flat, holds, tensors

quick = settings(max_examples=30)
either = st.booleans().flatmap(lambda varying: batches(varying=varying))


@quick
@given(either)
def test_it_holds_what_was_put_in(drawn: Drawn) -> None:
    kjt = drawn.kjt
    holds(kjt, drawn.lists, drawn.weights)
    assert kjt.offsets().tolist() == [sum(kjt.lengths().tolist()[:n]) for n in range(kjt.lengths().numel() + 1)]
    assert kjt.offset_per_key() == [sum(kjt.length_per_key()[:n]) for n in range(len(drawn.keys) + 1)]
    assert kjt.index_per_key() == {key: n for n, key in enumerate(drawn.keys)}
    validate(kjt, dict.fromkeys(drawn.keys, 100))


@quick
@given(either)
def test_dictionaries_round_trip(drawn: Drawn) -> None:
    holds(KeyedJaggedTensor.from_jt_dict(drawn.kjt.to_dict()), drawn.lists, drawn.weights)


@quick
@given(either, st.data())
def test_split_and_concat_undo_each_other(drawn: Drawn, data: Any) -> None:
    cut = data.draw(st.integers(0, len(drawn.keys)))
    left, right = drawn.kjt.split([cut, len(drawn.keys) - cut])
    for part, keys in ((left, drawn.keys[:cut]), (right, drawn.keys[cut:])):
        weights = None if drawn.weights is None else {key: drawn.weights[key] for key in keys}
        holds(part, {key: drawn.lists[key] for key in keys}, weights)
    if 0 < cut < len(drawn.keys):
        holds(KeyedJaggedTensor.concat([left, right]), drawn.lists, drawn.weights)


@quick
@given(either, st.data())
def test_permute_picks_keys_in_any_order_and_number(drawn: Drawn, data: Any) -> None:
    order = data.draw(st.lists(st.integers(0, len(drawn.keys) - 1), min_size=1, max_size=6))
    if data.draw(st.booleans()):
        drawn.kjt.sync()
    for permuted in (drawn.kjt.permute(order), drawn.kjt.permute(order, torch.tensor(order))):
        assert permuted.keys() == [drawn.keys[place] for place in order]  # a key taken twice keeps its name
        for place, taken in enumerate(order):
            part, key = permuted.feature(place), drawn.keys[taken]
            assert [ids.tolist() for ids in part.to_dense()] == drawn.lists[key]
            if drawn.weights is not None:
                assert [w.tolist() for w in part.to_dense_weights() or ()] == drawn.weights[key]


@quick
@given(either)
def test_text_is_that_of_the_tutorials(drawn: Drawn) -> None:
    entries = []
    for key, lists in drawn.lists.items():
        if drawn.weights is None:
            entries.append(f'    "{key}": {lists}')
        else:
            inner = f'        "values": {lists},\n        "weights": {drawn.weights[key]}\n'
            entries.append(f'    "{key}": {{\n{inner}    }}')
    assert str(drawn.kjt) == "KeyedJaggedTensor({\n" + ",\n".join(entries) + "\n})\n"


@quick
@given(either)
def test_copies_of_every_kind_hold_the_same(drawn: Drawn) -> None:
    kjt = drawn.kjt
    kjt.to_dict()  # is remembered; copies must not share it
    leaves, spec = pytree.tree_flatten(kjt)
    mapped = pytree.tree_map(lambda t: t + 0 if isinstance(t, torch.Tensor) else t, kjt)
    copies = [kjt.to("cpu"), pytree.tree_unflatten(leaves, spec), mapped, pickle.loads(pickle.dumps(kjt))]
    for other in [*copies, copy.deepcopy(kjt), kjt.flatten_lengths()]:
        holds(other, drawn.lists, drawn.weights)
        assert other.stride() == kjt.stride()


@quick
@given(batches(varying=True), st.data())
def test_expanding_repeats_lists_as_the_inverse_indices_say(drawn: Drawn, data: Any) -> None:
    batch = data.draw(st.integers(0, 5)) if all(drawn.lists.values()) else 0
    rows = {
        key: [data.draw(st.integers(0, len(lists) - 1)) for _ in range(batch)] for key, lists in drawn.lists.items()
    }
    listed = data.draw(st.permutations(drawn.keys))
    indices = torch.tensor([rows[key] for key in listed], dtype=torch.int64).view(len(listed), batch)
    strides = [[len(lists)] for lists in drawn.lists.values()]
    kjt = tensors(
        drawn.lists, drawn.weights, False, stride_per_key_per_rank=strides, inverse_indices=(list(listed), indices)
    )
    validate(kjt)
    lists = {key: [drawn.lists[key][row] for row in rows[key]] for key in drawn.keys}
    weights = None
    if drawn.weights is not None:
        weights = {key: [drawn.weights[key][row] for row in rows[key]] for key in drawn.keys}
    whole = kjt.expanded()
    assert not whole.variable_stride_per_key() and whole.stride() == kjt.stride() == batch
    holds(whole, lists, weights)
    order = data.draw(st.permutations(range(len(drawn.keys))))
    picked = [drawn.keys[n] for n in order]
    reordered = None if weights is None else {key: weights[key] for key in picked}
    holds(kjt.permute(order).expanded(), {key: lists[key] for key in picked}, reordered)
    parts = kjt.split([1] * len(drawn.keys))
    holds(KeyedJaggedTensor.concat([part.expanded() for part in parts]), lists, weights)
    holds(KeyedJaggedTensor.concat(parts).expanded(), lists, weights)
    leaves, spec = pytree.tree_flatten(kjt)
    holds(pytree.tree_unflatten(leaves, spec).expanded(), lists, weights)


def test_features_are_given_in_the_order_that_an_exported_model_takes() -> None:
    def model(kjt: KeyedJaggedTensor) -> torch.Tensor:
        return kjt.values() + kjt.lengths().sum()

    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
    wider = KeyedJaggedTensor(["c", "b", "a"], torch.tensor([9, 3, 1, 2]), lengths=torch.tensor([1, 0, 1, 0, 2, 0]))
    _, spec = pytree.tree_flatten(kjt)
    for leaf, expected in zip(tree_flatten_spec(wider, spec), tree_flatten_spec(kjt, spec), strict=True):
        assert leaf is expected is None or torch.equal(leaf, expected)
    assert torch.equal(model(kjt), model(pytree.tree_unflatten(tree_flatten_spec(wider, spec), spec)))
    with pytest.raises(ValueError, match=r"the model takes a feature 'b'; the input has \['a'\]"):
        tree_flatten_spec(kjt.split([1, 1])[0], spec)


def test_expanding_one_batch_size_changes_nothing_and_several_need_inverse_indices() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    assert kjt.expanded() is kjt
    varying = KeyedJaggedTensor(
        ["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(ValueError, match=r"batch sizes differ by key \(\{'a': 1, 'b': 2\}\), so give inverse_indices"):
        varying.expanded()


@quick
@given(batches(), st.data())
def test_gradients_of_weights_reach_every_copy_of_a_feature(drawn: Drawn, data: Any) -> None:
    order = data.draw(st.lists(st.integers(0, len(drawn.keys) - 1), min_size=1, max_size=6))
    weights = torch.ones(drawn.kjt.values().numel(), requires_grad=True)
    moved = drawn.kjt.with_weights(weights).permute(order).weights()
    (moved * torch.arange(moved.numel())).sum().backward()
    expected = torch.zeros(weights.numel())
    at, edges = 0, drawn.kjt.offset_per_key()
    for place in order:
        for n in range(edges[place], edges[place + 1]):
            expected[n] += at
            at += 1
    assert weights.grad is not None
    assert torch.equal(weights.grad, expected)


def test_strides_are_found_where_they_are_not_given() -> None:
    keys, values = ["a", "b"], torch.arange(6)
    assert KeyedJaggedTensor(keys, values, lengths=torch.tensor([2, 1, 1, 2])).stride() == 2
    assert KeyedJaggedTensor(keys, values, offsets=torch.tensor([0, 2, 3, 4, 6])).stride() == 2
    assert KeyedJaggedTensor([], values[:0], lengths=values[:0]).stride() == 0
    ranks = torch.tensor([[1, 2], [0, 1]])
    varying = KeyedJaggedTensor(keys, values, lengths=torch.tensor([2, 1, 1, 2]), stride_per_key_per_rank=ranks)
    assert varying.stride_per_key() == [3, 1]
    assert varying.stride_per_key_per_rank() == [[1, 2], [0, 1]]
    assert varying.variable_stride_per_key()


def test_factories() -> None:
    lengths, values = torch.tensor([1, 2, 0, 1]), torch.arange(4)
    by_lengths = KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, torch.tensor([0, 1, 3, 3, 4]))
    for kjt in (by_lengths, by_offsets):
        assert kjt.length_per_key_or_none() == [3, 1] and kjt.offset_per_key_or_none() == [0, 3, 4]
        holds(kjt, {"a": [[0], [1, 2]], "b": [[], [3]]}, None)
    nothing = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int32)
    assert (nothing.keys(), nothing.stride(), nothing.values().dtype) == ([], 0, torch.int32)
    assert nothing.weights().numel() == 0 and str(nothing) == "KeyedJaggedTensor()\n"
    assert KeyedJaggedTensor.from_jt_dict({}).keys() == []


def test_exchange_views_match_the_splits() -> None:
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(4), torch.ones(4), lengths=torch.tensor([1, 0, 2, 0, 0, 1]))
    assert kjt.dist_labels() == ["lengths", "values", "weights"]
    assert [t.numel() for t in kjt.dist_tensors()] == [6, 4, 4]
    assert kjt.dist_splits([1, 2]) == [[2, 4], [1, 3], [1, 3]]
    assert kjt.with_weights(None).dist_splits([2, 1]) == [[4, 2], [3, 1]]


def test_moving_changes_the_weights_dtype_on_demand() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), lengths=torch.tensor([2]))
    assert kjt.to("cpu", dtype=torch.float16).weights().dtype == torch.float16
    assert kjt.weights().dtype == torch.float32


def test_empty_lists_of_sum_are_kept() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64))
    holds(kjt.permute([1, 0]), {"b": [[], [], []], "a": [[], [], []]}, None)


ids, two = torch.arange(3), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedJaggedTensor(["a"], ids), "needs lengths or offsets"),
        (lambda: KeyedJaggedTensor(["a"], ids, torch.ones(2), two), "2 weights for 3 values"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two.float()), "lengths are torch.float32"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two.bool()), "lengths are torch.bool"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two, stride=3), "2 lengths do not fit 1 keys × 3 examples"),
        (lambda: KeyedJaggedTensor(["a", "b", "c"], ids, lengths=two), "2 lengths do not fit"),
        (
            lambda: KeyedJaggedTensor(["a", "b"], ids, lengths=two, stride_per_key_per_rank=[[2]]),
            "has 1 entries for 2 keys",
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a"], ids, lengths=two, stride_per_key_per_rank=[[2]], inverse_indices=(["b"], torch.zeros(1, 2))
            ),
            "inverse_indices lack key 'a'",
        ),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two).split([2]), r"segments \[2\] do not add up to 1 keys"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two).weights(), "has no weights"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two).inverse_indices(), "has no inverse indices"),
        (lambda: KeyedJaggedTensor(["a"], ids, lengths=two).with_weights(torch.ones(1)), "1 weights for 3 values"),
        (lambda: KeyedJaggedTensor.concat([]), "nothing to join"),
        (
            lambda: KeyedJaggedTensor.concat(
                [
                    KeyedJaggedTensor(["a"], ids, lengths=two),
                    KeyedJaggedTensor(["b"], ids, lengths=torch.tensor([1, 1, 1])),
                ]
            ),
            r"strides differ: \[2, 3\]",
        ),
        (
            lambda: KeyedJaggedTensor.concat(
                [KeyedJaggedTensor(["a"], ids, torch.ones(3), two), KeyedJaggedTensor(["b"], ids, lengths=two)]
            ),
            r"weighted and unweighted features cannot be joined; without weights: \['b'\]",
        ),
        (
            lambda: KeyedJaggedTensor.from_jt_dict(
                {"a": JaggedTensor(ids, torch.ones(3), two), "b": JaggedTensor(ids, lengths=two)}
            ),
            r"without weights: \['b'\]",
        ),
    ],
)
def test_wrong_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(KeyError, match=r"no feature 'x'; there are \['a'\]"):
        KeyedJaggedTensor(["a"], ids, lengths=two)["x"]


def faulty(**changes: Any) -> KeyedJaggedTensor:
    parts = {"values": torch.arange(5), "lengths": torch.tensor([1, 2, 0, 2]), **changes}
    return KeyedJaggedTensor(["a", "b"], **parts)


@pytest.mark.parametrize(
    ("kjt", "message"),
    [
        (faulty(lengths=torch.tensor([1, 2, -1, 3])), "feature 'b', example 0: length -1 is negative"),
        (faulty(lengths=torch.tensor([1, 2, 0, 3])), "lengths add up to 6, but there are 5 values"),
        (faulty(lengths=torch.ones(4, dtype=torch.int16)), "lengths are torch.int16"),
        (KeyedJaggedTensor(["a", "a"], torch.arange(5), lengths=torch.tensor([3, 2])), "key 'a' occurs twice"),
        (faulty(values=torch.ones(5)), "values are torch.float32"),
        (faulty(weights=torch.ones(5, dtype=torch.int64)), "weights are torch.int64"),
        (
            faulty(weights=torch.tensor([1, 1, 1, 1, float("nan")])),
            "feature 'b', example 1: weight nan of id 4 is not finite",
        ),
        (faulty(values=torch.tensor([0, 1, 2, 3, 9])), r"feature 'b', example 1: id 9 is outside .* \[0, 7\)"),
        (faulty(values=torch.tensor([0, 1, -2, 3, 4])), r"feature 'a', example 1: id -2 is outside .* \[0, 7\)"),
        (faulty(offsets=torch.tensor([0, 1, 2, 3, 5])), "feature 'a', example 1: length 2, but offsets go from 1 to 2"),
        (faulty(offsets=torch.tensor([1, 2, 3, 4, 5])), "offsets start at 1"),
        (faulty(offsets=torch.tensor([0, 5])), "2 offsets for 4 lengths"),
        (
            faulty(
                stride_per_key_per_rank=[[3], [1]],
                inverse_indices=(["b", "a"], torch.tensor([[0, 1], [2, 2]])),
            ),
            r"feature 'b', example 1: inverse index 1 is outside the feature's batch \[0, 1\)",
        ),
    ],
)
def test_validate_names_feature_example_and_value(kjt: KeyedJaggedTensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(kjt, {"a": 7, "b": 7})


@quick
@given(batches(), st.data())
def test_validate_finds_any_id_outside(drawn: Drawn, data: Any) -> None:
    count = drawn.kjt.values().numel()
    if count == 0:
        return
    at = data.draw(st.integers(0, count - 1))
    drawn.kjt.values()[at] = 100
    place = 0
    for key, lists in drawn.lists.items():
        for example, part in enumerate(lists):
            if place <= at < place + len(part):
                with pytest.raises(ValueError, match=rf"feature '{key}', example {example}: id 100 is outside"):
                    validate(drawn.kjt, dict.fromkeys(drawn.keys, 100))
            place += len(part)
    assert place == len([v for lists in drawn.lists.values() for v in flat(lists)])


def _ids(*values: int, device: str = "cpu") -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor(values), lengths=torch.tensor([len(values)])).to(device)


def test_a_copy_on_a_device_keeps_its_source_while_both_are_unchanged() -> None:
    """`meta` stands in for a GPU: its tensors have versions, and nothing can be copied back from them."""
    source = _ids(1, 2, 3)
    moved = source.to("meta")
    assert moved.on_host() is source and moved.length_per_key() == [3]
    assert source.to("cpu").host_copy() is None
    moved.values().zero_()
    assert moved.host_copy() is None
    moved = source.to("meta")
    source.values().copy_(torch.tensor([4, 5, 6]))  # a loader fills its buffer again
    assert moved.host_copy() is None
    weighted = source.with_weights(torch.ones(3))
    assert weighted.to("meta", dtype=torch.float16).host_copy() is None
    with torch.inference_mode():  # tensors without versions
        assert _ids(1, 2, device="meta").on_host().values().tolist() == [1, 2]


def test_copying_into_a_tensor_on_a_device_replaces_its_source() -> None:
    static = _ids(1, 2, 3, device="meta")
    first, second = _ids(4, 5, 6), _ids(7, 8, 9)
    assert static.copy_(first).on_host() is first
    assert static.copy_(second).on_host() is second
    assert static.copy_(_ids(1, 1, 1, device="meta")).host_copy() is None
