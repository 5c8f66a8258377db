"""Ids in the order of the ranks that hold their rows: compiled loops and torch's operators make the same of a batch.

Ids are checked before: each must be a row of every table that reads it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import ParameterSharding, Shard, ShardingType, Span
from rayrec.distributed.ids.batch import GROUPS, NUMBER, VALUES, Ids, OutgoingIds
from rayrec.distributed.ids.device_split import DeviceSplit
from rayrec.distributed.ids.input_dist import IdCheck
from rayrec.distributed.ids.routes import PlannedTable, Routes, make_routes
from rayrec.distributed.ids.sender import IdSender
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut


def tables_of(rows: list[int]) -> list[EmbeddingBagConfig]:
    """Table n reads f<n>; table 1 reads f0 as well."""
    return [
        EmbeddingBagConfig(
            name=f"t{n}", num_embeddings=size, embedding_dim=64, feature_names=[f"f{n}"] + ["f0"] * (n == 1)
        )
        for n, size in enumerate(rows)
    ]


def uneven(name: str, rows: int, world: int) -> list[Shard]:
    """Row shards of sizes 1, 2, 3 …, and the rest."""
    edges = [0, *(min(rows, n * (n + 1) // 2) for n in range(1, world)), rows]
    spans = [Span(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    return [Shard(table=name, rows=span, cols=Span(0, 64), rank=rank) for rank, span in enumerate(spans)]


def routes_of(tables: list[EmbeddingBagConfig], kinds: list[str], world: int) -> Routes:
    plan = {}
    for number, (table, kind) in enumerate(zip(tables, kinds, strict=True)):
        ranks = [number % world] if kind == "table_wise" else list(range(world))
        if kind == "uneven":
            shards = uneven(table.name, table.num_embeddings, world)
            plan[table.name] = ParameterSharding("row_wise", "fused", shards=shards)
        else:
            plan[table.name] = cut(table, ShardingType(kind), ranks)
    planned = [PlannedTable(table, plan[table.name], None) for table in tables]
    return make_routes(planned, world, lambda table: table.config.data_type)


def batch_of(
    tables: list[EmbeddingBagConfig], keys: list[str], batch: int, longest: int, dtype: torch.dtype, weighted: bool
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, longest + 1, (len(keys), batch))
    if longest == 1:
        lengths[: len(keys) // 2] = 1  # one id a bag, as most features have
    rows = {key: min([t.num_embeddings for t in tables if key in t.feature_names], default=9) for key in keys}
    values = torch.cat([torch.randint(0, rows[key], (int(n),)) for key, n in zip(keys, lengths.sum(1), strict=True)])
    weights = torch.rand(len(values)) if weighted else None
    return KeyedJaggedTensor(keys, values.to(dtype), weights, lengths=lengths.view(-1).to(dtype), stride=batch)


def plain_split(routes: Routes, kjt: KeyedJaggedTensor, weighted: bool, traced: bool) -> OutgoingIds:
    """The oracle of the compiled loops: the first batch of a sender, by selecting the ids of each stream in turn.

    Args:
        routes: routes of the collection.
        kjt: every feature of the routes, and maybe others; on the host.
        weighted: whether ids carry weights.
        traced: whether to record the origin of each id.
    """
    index, batch, ends = kjt.index_per_key(), kjt.stride(), kjt.offset_per_key()
    values, bags = kjt.values().to(torch.int64), torch.arange(batch)
    lengths_KB = kjt.lengths().view(len(kjt.keys()), batch).to(torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    lengths, ids, numbers = [lengths_KB[:0]], [empty], [empty]
    header = torch.zeros(len(routes.ranks), GROUPS + routes.num_groups, dtype=torch.int64)
    header[:, 1], header[:, NUMBER] = batch, 1
    for rank, route in enumerate(routes.ranks):
        sizes = []
        for stream in route.streams:
            variant = routes.variants[stream.variant]
            key = index[variant.feature]
            number, low, lengths_B = torch.arange(ends[key], ends[key + 1]), 0, lengths_KB[key]
            if variant.edges is not None:
                low, high = variant.edges[stream.bucket : stream.bucket + 2]
                inside = (values[number] >= low) & (values[number] < high)
                bag_N = bags.repeat_interleave(lengths_B, output_size=number.numel())
                number, lengths_B = number[inside], bag_N[inside].bincount(minlength=batch)
            lengths.append(lengths_B[None])
            ids.append(values[number] - low)
            numbers.append(number)
            sizes.append(number.numel())
        header[rank, VALUES] = sum(sizes)
        for lookup in route.lookups:
            header[rank, GROUPS + lookup.group] += sizes[lookup.stream]
    lengths_SB, origins = torch.cat(lengths), torch.cat(numbers)
    weights = kjt.weights()[origins] if weighted else None
    split = Ids(lengths_SB, torch.cat(ids), weights)
    if not traced:
        return OutgoingIds(split, header)
    key_F = [index[feature] for feature in routes.features]
    sizes_F = lengths_KB[key_F].sum(1)
    shift_K = torch.zeros(len(kjt.keys()), dtype=torch.int64)
    shift_K[key_F] = sizes_F.cumsum(0) - sizes_F - torch.tensor(ends)[key_F]
    origins = origins + shift_K.repeat_interleave(lengths_KB.sum(1))[origins]
    return OutgoingIds(split, header, lengths_FB=lengths_KB[key_F], origins=origins)


def compiled_split(routes: Routes, kjt: KeyedJaggedTensor, weighted: bool, traced: bool) -> OutgoingIds:
    return IdSender(routes, weighted, traced, num_counts=0).pack(kjt, ())


def assert_equal(actual: OutgoingIds, expected: OutgoingIds) -> None:
    assert actual.ids is not None and expected.ids is not None
    assert torch.equal(actual.ids.values, expected.ids.values)
    assert torch.equal(actual.ids.lengths.long(), expected.ids.lengths.long())
    assert torch.equal(actual.header, expected.header)
    assert (actual.ids.weights is None) == (expected.ids.weights is None)
    if actual.ids.weights is not None and expected.ids.weights is not None:
        assert torch.equal(actual.ids.weights, expected.ids.weights)
    assert (actual.origins is None) == (expected.origins is None)
    if actual.origins is not None and expected.origins is not None:
        assert actual.lengths_FB is not None and expected.lengths_FB is not None
        assert torch.equal(actual.lengths_FB.long(), expected.lengths_FB.long())
        assert torch.equal(actual.origins, expected.origins)


def assert_equal_on_a_device(routes: Routes, kjt: KeyedJaggedTensor, expected: OutgoingIds) -> None:
    """The device's operators run on a CPU too."""
    weights = kjt.weights_or_none()
    split = DeviceSplit(routes, weights is not None, torch.device("cpu"))
    counts = split.count(kjt)
    if weights is not None and weights.requires_grad:
        assert counts is None
        return
    assert counts is not None and expected.ids is not None
    outgoing = IdSender(routes, weights is not None, False, num_counts=0).pack(kjt, (), counts)
    assert outgoing.ids is None
    assert torch.equal(outgoing.header, expected.header)
    ids = split.split(kjt, outgoing)
    assert torch.equal(ids.values, expected.ids.values)
    assert torch.equal(ids.lengths.long(), expected.ids.lengths.long())
    assert (ids.weights is None) == (expected.ids.weights is None)
    if ids.weights is not None and expected.ids.weights is not None:
        assert torch.equal(ids.weights, expected.ids.weights)


@settings(max_examples=80)
@given(
    world=st.sampled_from([2, 3, 4, 8, 9, 16, 20, 300]),
    kinds=st.lists(st.sampled_from(["row_wise", "uneven", "table_wise", "column_wise"]), min_size=1, max_size=5),
    rows=st.lists(st.sampled_from([150, 1000, 10**6, 2**33]), min_size=5, max_size=5),
    batch=st.sampled_from([0, 1, 3, 17]),
    longest=st.sampled_from([0, 1, 3, 600]),
    extra=st.sampled_from(["", "weights", "trained weights", "origins"]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_both_make_the_same(
    world: int,
    kinds: list[str],
    rows: list[int],
    batch: int,
    longest: int,
    extra: str,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    if world in (3, 9, 20, 300):
        kinds = ["row_wise" if kind == "column_wise" else kind for kind in kinds]
    tables = tables_of([size if dtype is torch.int64 or size < 2**31 else 500 for size in rows[: len(kinds)]])
    routes = routes_of(tables, kinds, world)
    keys = [f"f{n}" for n in torch.randperm(len(kinds)).tolist()]
    keys.insert(seed % (len(keys) + 1), "of no table")
    kjt = batch_of(tables, keys, batch, longest, dtype, "weights" in extra)
    if extra == "trained weights":
        kjt.weights().requires_grad_()
    weighted, traced = "weights" in extra, extra == "origins"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual, expected = (split(routes, kjt, weighted, traced) for split in (compiled_split, plain_split))
    finally:
        torch.set_num_threads(before)
    assert_equal(actual, expected)
    if extra != "origins" and DeviceSplit(routes, "weights" in extra, torch.device("cpu")).possible:
        assert_equal_on_a_device(routes, kjt, expected)
    if extra == "trained weights":
        grads = []
        for split in (actual, expected):
            assert split.ids is not None and split.ids.weights is not None
            (grad,) = torch.autograd.grad(
                (split.ids.weights * torch.arange(split.ids.values.numel())).sum(), kjt.weights()
            )
            grads.append(grad)
        assert torch.equal(*grads)


def test_many_ids_are_split_by_several_threads_as_by_one() -> None:
    tables = tables_of([1000, 5000, 70, 10**6])
    routes = routes_of(tables, ["row_wise", "uneven", "table_wise", "row_wise"], 4)
    kjt = batch_of(tables, ["f0", "f1", "f2", "f3"], 2000, 20, torch.int64, weighted=True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(compiled_split(routes, kjt, True, False))
    finally:
        torch.set_num_threads(before)
    for split in found:
        assert_equal(split, found[0])
    assert_equal(found[0], plain_split(routes, kjt, True, False))


def test_rows_that_no_rank_reads_in_one_of_two_cuts_are_left_out() -> None:
    """Both halves of the first rows lie on rank 0 and are read as one; only below are the halves cut in two ways."""
    (table,) = tables_of([12])
    rectangles = [(0, 6, 0, 0), (6, 12, 0, 1), (0, 6, 32, 0), (6, 9, 32, 1), (9, 12, 32, 0)]
    shards = [
        Shard(table="t0", rows=Span(first, stop), cols=Span(col, col + 32), rank=rank)
        for first, stop, col, rank in rectangles
    ]
    plan = {"t0": ParameterSharding(ShardingType.GRID_SHARD.value, "fused", shards=shards)}
    routes = make_routes([PlannedTable(table, plan["t0"], None)], 2, lambda local: local.cols)
    assert len(routes.variants) == 2
    kjt = KeyedJaggedTensor(["f0"], torch.arange(12).repeat(3), lengths=torch.tensor([20, 0, 16]))
    for extra in (False, True):
        assert_equal(compiled_split(routes, kjt, False, extra), plain_split(routes, kjt, False, extra))
    assert not DeviceSplit(
        routes, False, torch.device("cpu")
    ).possible  # the buckets of one of the cuts are of unlike size


@pytest.mark.parametrize("kind", ["row_wise", "uneven"])
@pytest.mark.parametrize("bad", [-1, 1000, 2**40])
def test_an_id_outside_its_table_is_named(kind: str, bad: int) -> None:
    tables = tables_of([1000])
    sender = IdSender(routes_of(tables, [kind], 4), False, False, num_counts=0)
    kjt = KeyedJaggedTensor(["g", "f0"], torch.tensor([5000, 3, bad, 7]), lengths=torch.tensor([1, 0, 2, 1]))
    IdCheck(tables, False, {"f0"}).check(kjt)  # leaves this feature to the split
    outside = rf"feature 'f0': id {bad} is outside the rows \[0, 1000\) of table 't0'"
    with pytest.raises(ValueError, match=outside):
        sender.pack(kjt, ())
    for world in (1, 4, 20):
        routes = routes_of(tables, ["row_wise"], world)
        with pytest.raises(ValueError, match=outside):
            DeviceSplit(routes, False, torch.device("cpu")).count(kjt)


def test_ids_of_tables_of_unlike_sizes_are_checked() -> None:
    tables = tables_of([1000, 10])  # f0 is read by both
    kjt = KeyedJaggedTensor(["f0", "f1", "g"], torch.tensor([9, 10, 99]), lengths=torch.tensor([1, 1, 1]))
    check = IdCheck(tables, False)
    with pytest.raises(ValueError, match="feature 'f1': id 10 is outside the rows"):
        check.check(kjt)
    for unread in (99, -99, 2**63 - 1):
        ids = torch.tensor([9, 9, unread])
        check.check(KeyedJaggedTensor(["f0", "f1", "g"], ids, lengths=torch.tensor([1, 1, 1])))


def test_a_negative_length_is_refused_before_ids_are_counted_by_it() -> None:
    kjt = KeyedJaggedTensor(["f0"], torch.tensor([1, 2, 3]), lengths=torch.tensor([-2, 5]))
    with pytest.raises(ValueError, match="a length of -2; lengths are 0 or more"):
        IdCheck(tables_of([1000]), False, frozenset({"f0"})).check(kjt)


# -- the check of ids


def bag(name: str, rows: int, *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=list(features))


def problem(check: IdCheck, kjt: KeyedJaggedTensor) -> ValueError | None:
    try:
        check.check(kjt)
    except ValueError as error:
        return error
    return None


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], list[str], list[list[int]]]:
    """Tables that share features, keys in any order, one of them read by none, and ids around the edges."""
    sizes = draw(st.sampled_from([(3, 3), (3, 4), (5, 4), (8, 3)]))
    tables = [bag("t", sizes[0], "f", "g"), bag("u", sizes[1], "g", "h")]
    keys = draw(st.permutations(["f", "g", "h", "free"]))
    if draw(st.booleans()):
        keys = [key for key in keys if key != "free"]
    return tables, keys, [draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, -1]), max_size=2)) for _ in keys]


@settings(max_examples=40)
@given(batches())
def test_an_id_must_be_a_row_of_every_table_that_reads_it(
    given_: tuple[list[EmbeddingBagConfig], list[str], list[list[int]]],
) -> None:
    tables, keys, ids = given_
    limits: dict[str, int] = {}
    names: dict[str, str] = {}
    for table in tables:
        for feature in table.feature_names:
            if table.num_embeddings < limits.get(feature, table.num_embeddings + 1):
                limits[feature], names[feature] = table.num_embeddings, table.name
    bad = {
        key: one
        for key, of_key in zip(keys, ids, strict=True)
        for one in reversed(of_key)
        if key in limits and not 0 <= one < limits[key]
    }
    flat = torch.tensor([one for of_key in ids for one in of_key], dtype=torch.int64)
    kjt = KeyedJaggedTensor(keys, flat, lengths=torch.tensor([len(of_key) for of_key in ids]))
    check = IdCheck(tables, weighted=False)
    for _ in range(2):
        found = problem(check, kjt)
        if not bad:
            assert found is None
            continue
        feature = next(key for key in limits if key in bad)
        rows = f"the rows [0, {limits[feature]}) of table {names[feature]!r}"
        assert f"feature {feature!r}: id {bad[feature]} is outside {rows}" in str(found)


def test_batches_of_another_kind_are_refused() -> None:
    check, weighted = IdCheck([bag("t", 3, "f")], False), IdCheck([bag("t", 3, "f"), bag("u", 9, "g")], True)
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    assert "no feature 'f'" in str(problem(check, KeyedJaggedTensor(["a"], ids, lengths=lengths)))
    assert "int64 or int32" in str(problem(check, KeyedJaggedTensor(["f"], ids.short(), lengths=lengths)))
    assert problem(check, KeyedJaggedTensor(["f"], ids.int(), lengths=lengths)) is None
    assert problem(check, KeyedJaggedTensor(["f"], ids[:0], lengths=lengths * 0)) is None
    both = KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)
    assert "no weights" in str(problem(weighted, both))
    assert problem(weighted, KeyedJaggedTensor(["f", "g"], ids, torch.ones(2), lengths=lengths)) is None
    torn = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([1, 2]))
    assert "lengths add up to 3, but it has 2 ids" in str(problem(check, torn))
    twice = KeyedJaggedTensor(["f", "f"], torch.tensor([7, 1]), lengths=lengths)
    assert "feature 'f': id 7" in str(problem(check, twice)), "a key that comes twice, the first out of range"
