"""Cases of the sparse types."""

from __future__ import annotations

import copy
import io
import pickle
import random
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.torchrec.case import Cases
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def jt(rec: Package, **changes: Any) -> Any:
    parts = {"values": torch.arange(5), "lengths": ints(2, 0, 3), **changes}
    return rec("sparse.jagged_tensor").JaggedTensor(**parts)


def kjt(rec: Package, **changes: Any) -> Any:
    parts = {"keys": ["a", "b"], "values": torch.arange(5), "lengths": ints(1, 1, 2, 1), **changes}
    return rec.KeyedJaggedTensor(**parts)


def varying(rec: Package, **changes: Any) -> Any:
    return kjt(rec, lengths=ints(1, 1, 3), stride_per_key_per_rank=[[2], [1]], **changes)


def three(rec: Package, weighted: bool = False) -> Any:
    weights = torch.arange(6) / 4 if weighted else None
    return rec.KeyedJaggedTensor(["a", "b", "c"], torch.arange(6), weights, lengths=ints(1, 0, 2, 1, 0, 2))


def kt(rec: Package, keys: str = "ab", base: float = 0.0) -> Any:
    return rec.KeyedTensor(list(keys), [1, 2], torch.arange(6.0).view(2, 3) + base)


# -- JaggedTensor


@case("1/jt.JaggedTensor")
def jt_by_position(rec: Package) -> Any:
    return rec.JaggedTensor(torch.arange(3), torch.ones(3), ints(1, 2), ints(0, 1, 3))


@case("1/jt.JaggedTensor")
def jt_wrong_lengths(rec: Package) -> Any:
    bad = [torch.ones(2), torch.tensor([True, False]), None]
    return [attempt(lambda n=n: jt(rec, lengths=n)) for n in bad]


@case("1/jt.JaggedTensor", "weights that do not match the values are refused at construction")
def jt_too_few_weights(rec: Package) -> Any:
    return jt(rec, weights=torch.ones(2)).weights()


@case("1/jt.empty")
def jt_empty(rec: Package) -> Any:
    empty = rec.JaggedTensor.empty(is_weighted=True)
    typed = rec.JaggedTensor.empty(values_dtype=torch.int64, lengths_dtype=torch.int64)
    return [empty, typed.values(), typed.lengths()]


@case("1/jt.empty", "offsets of no lists are [0]: offsets always end with the number of values")
def jt_empty_offsets(rec: Package) -> Any:
    return rec.JaggedTensor.empty().offsets()


@case("1/jt.empty_like")
def jt_empty_like(rec: Package) -> Any:
    like = rec.JaggedTensor.empty_like(jt(rec, weights=torch.ones(5)))
    target = rec.JaggedTensor.empty_like(jt(rec, weights=torch.ones(5)), device=torch.device("cpu"))
    return [like, target.values().shape, target.lengths().shape, target.weights().dtype]


@case("1/jt.from_dense")
def jt_from_dense(rec: Package) -> Any:
    rows = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([2.0, 3.0])]
    make = rec.JaggedTensor.from_dense
    return [make(rows), make(rows, rows), make(rows).offsets(), attempt(lambda: make([]))]


@case("1/jt.from_dense_lengths")
def jt_from_dense_lengths(rec: Package) -> Any:
    padded = torch.arange(6).view(2, 3)
    return [
        rec.JaggedTensor.from_dense_lengths(padded, torch.tensor([1, 3], dtype=torch.int32)),
        rec.JaggedTensor.from_dense_lengths(padded, ints(0, 2), padded.float()),
    ]


@case("1/jt.to_dense")
def jt_to_dense(rec: Package) -> Any:
    late = rec.JaggedTensor(torch.arange(6), offsets=ints(1, 3, 6))
    weighted = jt(rec, weights=torch.arange(5) / 2)
    return [jt(rec).to_dense(), jt(rec).to_dense_weights(), late.to_dense(), weighted.to_dense_weights()]


@case("1/jt.to_padded_dense")
def jt_to_padded(rec: Package) -> Any:
    vectors = rec.JaggedTensor(torch.arange(6.0).view(3, 2), lengths=ints(1, 2))
    weighted = jt(rec, weights=torch.arange(5) / 2)
    return [
        jt(rec).to_padded_dense(),
        jt(rec).to_padded_dense(2, 9.5),
        jt(rec).to_padded_dense(desired_length=0),
        vectors.to_padded_dense(3, -1.0),
        weighted.to_padded_dense_weights(desired_length=4, padding_value=0.5),
        attempt(jt(rec).to_padded_dense_weights),
    ]


@case("1/jt.values")
def jt_reading(rec: Package) -> Any:
    by_lengths, by_offsets = jt(rec), rec.JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 1, 3]).int())
    before = [by_lengths.offsets_or_none(), by_offsets.lengths_or_none(), by_lengths.weights_or_none()]
    after = [by_lengths.offsets(), by_offsets.lengths(), by_lengths.offsets_or_none(), by_offsets.values()]
    return [before, after, attempt(by_lengths.weights)]


@case("1/jt.device")
def jt_device(rec: Package) -> Any:
    return jt(rec).device()


@case("1/jt.to")
def jt_to(rec: Package) -> Any:
    one = jt(rec)
    return [one.to(torch.device("cpu")) is one, one.to(torch.device("meta"), non_blocking=True).device()]


@case("1/jt.record_stream")
def jt_record_stream(rec: Package) -> Any:
    return hasattr(jt(rec), "record_stream")


@case("1/jt.size_in_bytes")
def jt_sizes_and_copies(rec: Package) -> Any:
    target = jt(rec, values=torch.zeros(5, dtype=torch.int64))
    return [jt(rec).size_in_bytes(), target.copy_(jt(rec)) is target, target]


@case("1/jt.str")
def jt_text(rec: Package) -> Any:
    empty = rec.JaggedTensor(torch.arange(0), lengths=ints())
    return [str(jt(rec)), str(jt(rec, weights=torch.ones(5))), str(empty)]


@case("1/jt.pytree")
def jt_leaves(rec: Package) -> Any:
    leaves, spec = pytree.tree_flatten(jt(rec))
    return [leaves, pytree.tree_unflatten(leaves, spec), pickle.loads(pickle.dumps(jt(rec))), copy.deepcopy(jt(rec))]


@case("1/jt.attributes")
def jt_attributes(rec: Package) -> Any:
    one = jt(rec)
    one.note = "mine"
    return [one.note, weakref.ref(one)() is one]


# -- KeyedJaggedTensor


@case("1/kjt.KeyedJaggedTensor")
def kjt_by_position(rec: Package) -> Any:
    one = rec.KeyedJaggedTensor(
        ("a", "b"), torch.arange(5), torch.ones(5), ints(1, 1, 2, 1), None, 2, None, None, [2, 3]
    )
    return [one, one.length_per_key_or_none(), kjt(rec, keys=["a", "a"]).keys()]


@case("1/kjt.KeyedJaggedTensor")
def kjt_lengths_by_key(rec: Package) -> Any:
    return [
        kjt(rec, lengths=ints(1, 1, 2, 1).view(2, 2)).to_dict(),
        attempt(lambda: kjt(rec, lengths=torch.ones(4))),
        attempt(lambda: kjt(rec, lengths=None, offsets=torch.ones(5))),
    ]


@case("1/kjt.KeyedJaggedTensor", "lengths that are not a multiple of the keys, or do not match the stride, are refused")
def kjt_lengths_that_do_not_fit(rec: Package) -> Any:
    return [kjt(rec, lengths=ints(1, 1, 3)).stride(), kjt(rec, stride=7).stride()]


@case("1/kjt.KeyedJaggedTensor", "a tensor without lengths and offsets is refused; it would be read as no examples")
def kjt_without_lengths(rec: Package) -> Any:
    return kjt(rec, lengths=None).stride()


@case("1/kjt.from_lengths_sync")
def kjt_synced(rec: Package) -> Any:
    one = rec.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(5), ints(1, 1, 2, 1), None, 2)
    two = rec.KeyedJaggedTensor.from_offsets_sync(
        ["a", "b"], torch.arange(5), ints(0, 1, 2, 4, 5), torch.ones(5), 2, None
    )
    return [one, one.length_per_key_or_none(), two, two.offset_per_key_or_none()]


@case("1/kjt.from_jt_dict")
def kjt_from_dict(rec: Package) -> Any:
    make = rec.KeyedJaggedTensor.from_jt_dict
    short = rec.JaggedTensor(torch.arange(3), lengths=ints(3))
    uneven = make({"a": jt(rec), "b": short})
    weighted = jt(rec, weights=torch.ones(5))
    return [make({"x": jt(rec), "y": jt(rec)}), uneven, uneven.stride(), make({"a": weighted})]


@case("1/kjt.from_jt_dict", "weighted and unweighted features are refused; what TorchRec makes of them cannot be read")
def kjt_from_mixed_dict(rec: Package) -> Any:
    mixed = {"a": jt(rec), "b": jt(rec, weights=torch.ones(5))}
    return rec.KeyedJaggedTensor.from_jt_dict(mixed).keys()


@case("1/kjt.concat")
def kjt_concat(rec: Package) -> Any:
    join = rec.KeyedJaggedTensor.concat
    return [
        join([kjt(rec), kjt(rec, keys=["c", "d"])]),
        join([kjt(rec), kjt(rec)]).keys(),
        join([varying(rec), varying(rec, weights=None)]).stride_per_key(),
        attempt(lambda: join([])),
        attempt(lambda: join([kjt(rec), kjt(rec, weights=torch.ones(5))])),
        attempt(
            lambda: join([kjt(rec), three(rec).permute([0]), rec.KeyedJaggedTensor(["z"], ints(1), lengths=ints(1))])
        ),
    ]


@case("1/kjt.empty")
def kjt_empty(rec: Package) -> Any:
    empty = rec.KeyedJaggedTensor.empty(is_weighted=True)
    typed = rec.KeyedJaggedTensor.empty(values_dtype=torch.int64, weights_dtype=torch.float16, is_weighted=True)
    return [empty, empty.stride(), empty.offsets(), typed, str(empty)]


@case("1/kjt.empty_like")
def kjt_empty_like(rec: Package) -> Any:
    like = rec.KeyedJaggedTensor.empty_like(kjt(rec))
    target = rec.KeyedJaggedTensor.empty_like(kjt(rec), torch.device("cpu"))
    shapes = [target.keys(), target.values().shape, target.lengths().shape, target.stride()]
    return [like.keys(), like.values(), like.stride(), shapes, target.copy_(kjt(rec))]


@case("1/kjt.keys")
def kjt_reading(rec: Package) -> Any:
    one = kjt(rec)
    before = [one.offsets_or_none(), one.weights_or_none(), one.lengths_or_none()]
    return [before, one.keys(), one.values(), one.offsets(), one.offsets_or_none(), one.device(), attempt(one.weights)]


@case("1/kjt.stride")
def kjt_strides(rec: Package) -> Any:
    make = rec.KeyedJaggedTensor
    inverse = varying(rec, inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])))
    return [
        kjt(rec).stride(),
        kjt(rec, lengths=None, offsets=ints(0, 1, 2, 4, 5)).stride(),
        make([], torch.arange(0), lengths=ints()).stride(),
        make([], torch.arange(0), lengths=ints(), stride=3).stride(),
        varying(rec).stride(),
        inverse.stride(),
    ]


@case("1/kjt.stride_per_key")
def kjt_varying_strides(rec: Package) -> Any:
    equal = kjt(rec, stride_per_key_per_rank=torch.tensor([[1, 1], [2, 0]], dtype=torch.int32))
    return [
        (
            one.stride_per_key(),
            [list(map(int, s)) for s in one.stride_per_key_per_rank()],
            one.variable_stride_per_key(),
        )
        for one in (varying(rec), equal)
    ] + [kjt(rec).stride_per_key(), kjt(rec).variable_stride_per_key()]


@case("1/kjt.inverse_indices")
def kjt_inverse(rec: Package) -> Any:
    one = varying(rec, inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])))
    return [one.inverse_indices(), kjt(rec).inverse_indices_or_none(), attempt(kjt(rec).inverse_indices)]


@case("1/kjt.length_per_key")
def kjt_lengths_per_key(rec: Package) -> Any:
    out = []
    for one in (kjt(rec), varying(rec), three(rec), kjt(rec).permute([])):
        before = [one.length_per_key_or_none(), one.offset_per_key_or_none()]
        out.append([before, one.length_per_key(), one.offset_per_key(), one.length_per_key_or_none()])
    return out


@case("1/kjt.lengths_offset_per_key")
def kjt_lengths_offsets(rec: Package) -> Any:
    return [kjt(rec).lengths_offset_per_key(), varying(rec).lengths_offset_per_key()]


@case("1/kjt.index_per_key")
def kjt_index(rec: Package) -> Any:
    return [kjt(rec).index_per_key(), kjt(rec, keys=["a", "a"]).index_per_key()]


@case("1/kjt.sync")
def kjt_sync(rec: Package) -> Any:
    one = kjt(rec)
    synced = one.sync() is one
    filled = [one.length_per_key_or_none(), one.offset_per_key_or_none()]
    return [synced, filled, one.unsync() is one, one.length_per_key_or_none()]


@case("1/kjt.to_dict")
def kjt_to_dict(rec: Package) -> Any:
    one, other = kjt(rec), kjt(rec)
    parts = one.to_dict()
    late = other.to_dict(compute_offsets=False)
    twice = kjt(rec, keys=["a", "a"]).to_dict()
    return [parts, parts["b"].offsets_or_none(), one.to_dict() is parts, late["b"].offsets_or_none(), twice]


@case("1/kjt.kjt[key]")
def kjt_item(rec: Package) -> Any:
    return [kjt(rec)["b"], three(rec, weighted=True)["c"], varying(rec)["b"], attempt(lambda: kjt(rec)["z"])]


@case("1/kjt.split")
def kjt_split(rec: Package) -> Any:
    one = three(rec, weighted=True)
    whole = one.split([3])
    return [one.split([1, 2]), one.split([0, 3])[0].stride(), whole[0] is one, varying(rec).split([1, 1])]


@case("1/kjt.split", "segments that omit keys are refused; TorchRec drops these keys")
def kjt_split_short(rec: Package) -> Any:
    return three(rec).split([1, 1])


@case("1/kjt.permute")
def kjt_permute(rec: Package) -> Any:
    one = three(rec, weighted=True)
    order = torch.tensor([2, 0], dtype=torch.int32)
    return [
        one.permute([2, 0, 1]),
        one.permute([1, 0, 1]),
        one.permute([2, 0], order),
        one.permute([]),
        one.permute([]).stride(),
        varying(rec).permute([1, 0, 1]),
    ]


@case("1/kjt.permute", "inverse indices stay with their keys; TorchRec drops them, and the batch can no longer be read")
def kjt_permute_inverse(rec: Package) -> Any:
    one = varying(rec, inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])))
    return one.permute([1, 0]).inverse_indices_or_none()


@case("1/kjt.flatten_lengths")
def kjt_flat_lengths(rec: Package) -> Any:
    return kjt(rec, lengths=ints(1, 1, 2, 1).view(2, 2)).flatten_lengths().lengths()


@case("1/kjt.to")
def kjt_to(rec: Package) -> Any:
    one = kjt(rec, weights=torch.ones(5))
    half = one.to(torch.device("cpu"), dtype=torch.float16)
    return [half, half is one, one.to(torch.device("meta"), non_blocking=True).device()]


@case("1/kjt.pin_memory")
def kjt_can_be_pinned(rec: Package) -> Any:
    return [hasattr(kjt(rec), "pin_memory"), hasattr(kjt(rec), "record_stream")]


@case("1/kjt.dist_labels")
def kjt_messages(rec: Package) -> Any:
    out = []
    for one, parts in ((kjt(rec), [1, 1]), (three(rec, weighted=True), [2, 1]), (varying(rec), [1, 1])):
        out.append([one.dist_labels(), one.dist_tensors(), one.dist_splits(parts)])
    return out


@case("1/kjt.dist_init")
def kjt_from_messages(rec: Package) -> Any:
    make = rec.KeyedJaggedTensor.dist_init
    lengths, recat = ints(1, 1, 2, 0, 3, 0, 1, 1), torch.tensor([0, 2, 1, 3], dtype=torch.int32)
    even = make(["a", "b"], [lengths, torch.arange(9)], False, 2, recat, [2, 2])
    weighted = make(["a", "b"], [lengths, torch.arange(9), torch.arange(9.0)], False, 2, recat, [2, 2])
    strides = ints(1, 1, 2, 0)
    varying = make(["a", "b"], [ints(1, 2, 0, 3), torch.arange(6), strides], True, 2, recat, None)
    single = make(["a", "b"], [lengths, torch.arange(9)], False, 1, None, [4])
    return [even, weighted, varying, varying.stride_per_key_per_rank(), single]


@case("1/kjt.size_in_bytes")
def kjt_sizes_and_copies(rec: Package) -> Any:
    target = rec.KeyedJaggedTensor.empty_like(kjt(rec), torch.device("cpu"))
    same = target.copy_(kjt(rec)) is target
    gone = kjt(rec)
    gone.clear_storage()
    return [kjt(rec).size_in_bytes(), same, target, gone.values().untyped_storage().size()]


@case("1/kjt.str")
def kjt_text(rec: Package) -> Any:
    empty = rec.KeyedJaggedTensor(["a"], torch.arange(0), lengths=ints())
    nothing = rec.KeyedJaggedTensor([], torch.arange(0), lengths=ints())
    return [str(kjt(rec)), str(three(rec, weighted=True)), str(varying(rec)), str(nothing), str(empty)]


@case("1/kjt.pytree", "variable batch sizes stay on the host: 5 leaves, not 6")
def kjt_leaf_count(rec: Package) -> Any:
    return len(pytree.tree_flatten(varying(rec))[0])


@case("1/kjt.pytree")
def kjt_tree_map(rec: Package) -> Any:
    return [pytree.tree_map(lambda t: t + 1 if isinstance(t, torch.Tensor) else t, kjt(rec)).values()]


@case("1/kjt.torch.save")
def kjt_saved(rec: Package) -> Any:
    file = io.BytesIO()
    torch.save(three(rec, weighted=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    one = kjt(rec)
    return [loaded, pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one == kjt(rec), hasattr(one, "__len__")]


@case("1/kjt.attributes")
def kjt_attributes(rec: Package) -> Any:
    one = kjt(rec)
    one.note = "mine"
    return [one.note, weakref.ref(one)() is one]


# -- KeyedTensor and functions


@case("1/kt.KeyedTensor")
def kt_by_position(rec: Package) -> Any:
    one = rec.KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3), 1, [0, 1, 3], {"a": 0, "b": 1})
    twice = rec.KeyedTensor(["a", "a"], [1, 2], torch.arange(6.0).view(2, 3))
    return [one, one.offset_per_key(), twice.to_dict(), twice["a"]]


@case("1/kt.KeyedTensor", "widths that do not add up to the tensor's are refused")
def kt_wrong_widths(rec: Package) -> Any:
    return rec.KeyedTensor(["a"], [2], torch.arange(6.0).view(2, 3)).keys()


@case("1/kt.from_tensor_list")
def kt_from_list(rec: Package) -> Any:
    make = rec.KeyedTensor.from_tensor_list
    blocks = [torch.arange(2.0).view(2, 1), torch.arange(4.0).view(2, 2)]
    return [make(["a", "b"], blocks), make(["a", "b"], [b.t() for b in blocks], key_dim=0, cat_dim=0).to_dict()]


@case("1/kt.keys")
def kt_reading(rec: Package) -> Any:
    one = kt(rec)
    facts = [one.keys(), one.key_dim(), one.length_per_key(), one.offset_per_key(), one.device()]
    source = torch.arange(6.0).view(2, 3).requires_grad_()
    rec.KeyedTensor(["a", "b"], [1, 2], source)["b"].sum().backward()
    return [facts, one.values(), one["b"], one.to_dict(), source.grad, attempt(lambda: one["z"])]


@case("1/kt.regroup")
def kt_regroup(rec: Package) -> Any:
    regroup, both = rec.KeyedTensor.regroup, [kt(rec, "ab"), kt(rec, "bc", 10)]
    return [
        regroup(both, [["a", "c"], ["b"], ["b", "a"]]),
        regroup(both, [["a"], []]),
        attempt(lambda: regroup(both, [["z"]])),
    ]


@case("1/kt.regroup_as_dict")
def kt_regroup_as_dict(rec: Package) -> Any:
    regroup, both = rec.KeyedTensor.regroup_as_dict, [kt(rec, "ab"), kt(rec, "cd", 10)]
    groups = [["a", "c"], ["d"]]
    return [regroup(both, groups, ["x", "y"]), attempt(lambda: regroup(both, groups, ["x"]))]


@case("1/kt.to")
def kt_moving(rec: Package) -> Any:
    one = kt(rec)
    leaves, spec = pytree.tree_flatten(one)
    return [one.to(torch.device("cpu")), str(one), leaves, pytree.tree_unflatten(leaves, spec)]


@case("1/kt.size_in_bytes")
def kt_size(rec: Package) -> Any:
    return kt(rec).size_in_bytes()


@case("1/kt.ComputeKJTToJTDict")
def conversion_modules(rec: Package) -> Any:
    home = rec("sparse.jagged_tensor")
    parts = home.ComputeKJTToJTDict()(kjt(rec))
    return [parts, home.ComputeJTDictToKJT()(parts), isinstance(home.ComputeKJTToJTDict(), torch.nn.Module)]


@case("1/kt.jt_is_equal")
def equality_helpers(rec: Package) -> Any:
    home = rec("sparse.jagged_tensor")
    by_offsets = rec.JaggedTensor(torch.arange(5), offsets=ints(0, 2, 2, 5))
    weighted = jt(rec, weights=torch.ones(5))
    jts = [jt(rec), by_offsets, weighted, jt(rec, lengths=ints(1, 1, 3)), jt(rec, values=torch.ones(5).long()), "no"]
    kjts = [kjt(rec), kjt(rec, keys=["b", "a"]), three(rec), kjt(rec, weights=torch.ones(5)), "no"]
    kjts.append(kjt(rec, lengths=None, offsets=ints(0, 1, 2, 4, 5)))
    return [[home.jt_is_equal(jt(rec), o) for o in jts], [home.kjt_is_equal(kjt(rec), o) for o in kjts]]


@case("1/kt.regroup_kts")
def regroup_functions(rec: Package) -> Any:
    home, both, groups = rec("sparse.jagged_tensor"), [kt(rec, "ab"), kt(rec, "cd", 10)], [["d", "a"], ["c"]]
    return [home.regroup_kts(both, groups), home.permute_multi_embedding(both, groups)]


@case("1/kt.flatten_kjt_list")
def flat_lists(rec: Package) -> Any:
    home = rec("sparse.jagged_tensor")
    tensors, keys = home.flatten_kjt_list([kjt(rec), varying(rec)])
    return [tensors, keys, home.unflatten_kjt_list(tensors, keys)]


@case("1/kt.sparse.jagged_tensor_validator.validate_keyed_jagged_tensor")
def validator(rec: Package) -> Any:
    validate = rec("sparse.jagged_tensor_validator").validate_keyed_jagged_tensor
    config = rec.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["b", "other"])
    wide = rec.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["b"])
    wrong = [
        kjt(rec, lengths=ints(1, 1, 2, 2)),
        kjt(rec, lengths=None, offsets=ints(1, 2, 3, 4, 5)),
        kjt(rec, offsets=ints(0, 2, 2, 4, 5)),
        kjt(rec, keys=["a", "a"]),
    ]
    return [
        validate(kjt(rec)),
        validate(kjt(rec), [config]),
        validate(kjt(rec), [wide]),
        [attempt(lambda one=one: validate(one)) for one in wrong],
    ]


@case("1/kt.sparse.jagged_tensor_validator.validate_keyed_jagged_tensor", "negative lengths are refused")
def validator_of_negative_lengths(rec: Package) -> Any:
    return rec("sparse.jagged_tensor_validator").validate_keyed_jagged_tensor(kjt(rec, lengths=ints(3, -1, 2, 1)))


@case("1/kt.sparse.tensor_dict.maybe_td_to_kjt")
def tensor_dicts(rec: Package) -> Any:
    one = kjt(rec)
    return rec("sparse.tensor_dict").maybe_td_to_kjt(one) is one


# -- drawn


def draw(rec: Package, numbers: random.Random) -> Any:
    """Any sound tensor: some features of some examples, of one batch size or of several, weighted or not."""
    keys = [f"f{n}" for n in range(numbers.randint(1, 4))]
    batch = numbers.randint(1, 4)
    sizes = [numbers.randint(1, 4) for _ in keys] if numbers.random() < 0.4 else [batch] * len(keys)
    lengths = [numbers.choice([0, 0, 1, 2, 3]) for _ in range(sum(sizes))]
    values = torch.tensor([numbers.randint(0, 99) for _ in range(sum(lengths))], dtype=torch.int64)
    weights = torch.tensor([numbers.random() for _ in values]) if numbers.random() < 0.5 else None
    strides = [[size] for size in sizes] if len(set(sizes)) > 1 else None
    return rec.KeyedJaggedTensor(keys, values, weights, ints(*lengths), stride_per_key_per_rank=strides)


@case("1/kjt.permute")
def drawn_kjts(rec: Package) -> Any:
    numbers, out = random.Random(12), []
    for _ in range(40):
        one = draw(rec, numbers)
        num = len(one.keys())
        order = [numbers.randrange(num) for _ in range(numbers.randint(1, 5))]
        cut = numbers.randint(1, num)
        permuted = one.permute(order)
        padded = one[one.keys()[0]].to_padded_dense(numbers.randint(0, 3), -1)
        out.append(
            [
                str(one),
                permuted,
                permuted.offset_per_key(),
                one.split([cut, num - cut][: 1 if cut == num else 2]),
                padded,
            ]
        )
        out.append([one.length_per_key(), one.stride(), one.to_dict(), rec.KeyedJaggedTensor.concat([one, permuted])])
    return out


@case("1/kt.regroup")
def drawn_kts(rec: Package) -> Any:
    numbers, out = random.Random(13), []
    for place in range(30):
        torch.manual_seed(place)
        widths = [[numbers.randint(1, 4) for _ in range(numbers.randint(1, 3))] for _ in range(2)]
        names = [[f"{'ab'[side]}{n}" for n in range(len(of))] for side, of in enumerate(widths)]
        both = [rec.KeyedTensor(n, w, torch.rand(3, sum(w))) for n, w in zip(names, widths, strict=True)]
        every = [*names[0], *names[1]]
        groups = [[numbers.choice(every) for _ in range(numbers.randint(1, 4))] for _ in range(2)]
        out.append([rec.KeyedTensor.regroup(both, groups), both[0].to_dict(), str(both[1])])
    return out
