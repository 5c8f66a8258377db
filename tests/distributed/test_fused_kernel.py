"""Tables in one fbgemm module train and are shown as tables of their own, by the compiled update and by fbgemm's."""

from __future__ import annotations

import resource
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingComputeKernel,
    EmbOptimType,
    ParameterSharding,
    Shard,
    ShardingEnv,
    Span,
)
from rayrec.distributed.kernel import FusedKernel, LocalTable, Lookups, OptimizerSpec, RowKernel, make_pooling_kernel
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig

ROWS = [3, 5, 4, 2, 6]
ONE_WIDTH, TWO_WIDTHS, PADDED = [8] * 5, [16, 16, 16, 8, 8], [6] * 5
BY_FBGEMM = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
ADAMS = [EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM]
SEVERAL = [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]


def local_table(number: int, kind: EmbOptimType, dim: int) -> LocalTable:
    config = EmbeddingBagConfig(
        name=f"t{number}", num_embeddings=ROWS[number], embedding_dim=dim, feature_names=[f"f{number}"]
    )
    return LocalTable(
        config=config,
        rows=Span(0, ROWS[number]),
        cols=Span(0, dim),
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=OptimizerSpec.from_fused_params({"optimizer": kind, "learning_rate": 0.1}),
    )


def plain(tables: list[LocalTable], table_of_lookup: list[int]) -> RowKernel:
    """A kernel that trains by torch's operators."""
    kernel = RowKernel(tables, table_of_lookup, torch.device("cpu"))
    kernel.compiled = None
    return kernel


def by_loop(kernel: FusedKernel, batch: Lookups) -> torch.Tensor:
    """The kernel's bags, trained by the compiled loop whatever the batch's shape."""
    kernel.loop_is_faster = lambda *_: True
    return kernel.lookup(batch)


@pytest.mark.parametrize("features", [[0, 1, 2, 3, 4], SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("kind", BY_FBGEMM)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "fbgemm"])
@pytest.mark.parametrize("weighted, dims", [(False, ONE_WIDTH), (True, TWO_WIDTHS), (True, PADDED)])
def test_tables_train_alike_in_fbgemms_kernels_and_in_torchs(
    kind: EmbOptimType, features: list[int], weighted: bool, dims: list[int], compiled: bool
) -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    tables = [local_table(number, kind, dims[number]) for number in range(5)]
    kernel = FusedKernel(tables, features, cpu)
    assert kernel._compiled is not None
    if not compiled:
        kernel._compiled = None
    others = [plain([table], [0] * features.count(number)) for number, table in enumerate(tables)]
    weights, states = kernel.weights(), kernel.states()  # views, which training changes
    for weight, other in zip(weights, others, strict=True):
        weight.copy_(torch.rand(weight.shape, generator=generator))
        other.weights()[0].copy_(weight)
    for batch in (2, 0, 3, 3, 3):
        lengths = torch.randint(0, 3, (batch * len(features),), generator=generator)
        counts = lengths.view(len(features), batch).sum(1).tolist()
        ids = [torch.randint(0, ROWS[t], (n,), generator=generator) for t, n in zip(features, counts, strict=True)]
        factors = torch.rand(sum(counts), generator=generator)
        grad = torch.rand((batch, sum(dims[table] for table in features)), generator=generator)
        kernel.learning_rate *= 0.9
        out = kernel.lookup(lookups(torch.cat(ids), lengths, factors, weighted))
        out.backward(grad)
        first_id = column = 0
        for number, other in enumerate(others):
            own = slice(features.index(number), features.index(number) + features.count(number))
            num_ids, width = sum(counts[own]), dims[number] * features.count(number)
            of_table = lookups(
                torch.cat(ids[own]),
                lengths.view(len(features), batch)[own].flatten(),
                factors[first_id : first_id + num_ids],
                weighted,
            )
            other.learning_rate *= 0.9
            expected = other.lookup(of_table)
            expected.backward(grad[:, column : column + width])
            torch.testing.assert_close(out[:, column : column + width], expected)
            first_id, column = first_id + num_ids, column + width
        for number, other in enumerate(others):
            torch.testing.assert_close(weights[number], other.weights()[0])
            torch.testing.assert_close(states[number], other.states()[0])
    assert kernel.iteration == 5


def lookups(ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor, weighted: bool) -> Lookups:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Lookups(ids, offsets, weights if weighted else None)


def test_weights_are_written_back_and_the_cache_emptied_before_anyone_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=8, feature_names=["f"])
    shards = (Shard(table="t", rows=Span(0, 3), cols=Span(0, 8), rank=0),)
    plan = {"t": ParameterSharding(sharding_type="table_wise", compute_kernel="fused", shards=shards)}
    module = EmbeddingBagCollection([config])
    sharded = EmbeddingBagCollectionSharder({}).shard(module, plan, ShardingEnv.from_local(1, 0), torch.device("cpu"))
    (kernel,), table = sharded.kernels(), sharded.tables()["t"]
    assert isinstance(kernel, FusedKernel)
    calls: list[str] = []
    monkeypatch.setattr(kernel._tbe, "flush", lambda: calls.append("flush"))
    monkeypatch.setattr(kernel._tbe, "reset_cache_states", lambda: calls.append("reset"))
    for use in (table.state_dict, lambda: table.load_state_dict({"weight": torch.ones(3, 8)})):
        calls.clear()
        use()
        assert calls == ["flush", "reset"]
    out = kernel.lookup(lookups(torch.tensor([1]), torch.tensor([1]), torch.ones(1), weighted=False))
    calls.clear()
    table.state_dict()
    assert calls == ["flush"]  # the backward under way writes into the cache
    out.sum().backward()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@settings(max_examples=12)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5000), st.sampled_from([4, 8, 20, 64])), min_size=1, max_size=4),
    batch=st.sampled_from([1, 7, 300]),
    longest=st.sampled_from([1, 3, 40]),
    weighted=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_any_batch_trains_as_in_torchs_operators_and_each_time_alike(
    kind: str, sizes: list[tuple[int, int]], batch: int, longest: int, weighted: bool, threads: int, seed: int
) -> None:
    generator, cpu = torch.Generator().manual_seed(seed), torch.device("cpu")
    spec = OptimizerSpec.from_fused_params({"optimizer": kind, "learning_rate": 0.1, "eps": 0.01})
    tables = [
        LocalTable(
            config=EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{n}"]),
            rows=Span(0, rows),
            cols=Span(0, dim),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=spec,
        )
        for n, (rows, dim) in enumerate(sizes)
    ]
    lengths = torch.randint(0, longest + 1, (len(tables), batch), generator=generator)
    ids = [  # half of them are of few rows
        torch.randint(0, rows if number % 2 else min(rows, 3), (int(count),), generator=generator)
        for number, ((rows, _), count) in enumerate(zip(sizes, lengths.sum(1), strict=True))
    ]
    factors = torch.rand(int(lengths.sum()), generator=generator)
    given_lookups = lookups(torch.cat(ids), lengths.flatten(), factors, weighted)
    grad = torch.randn((batch, sum(dim for _, dim in sizes)), generator=generator)
    first = [torch.rand((rows, dim), generator=generator) for rows, dim in sizes]
    found = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, threads):  # three threads also divide a table
            torch.set_num_threads(num_threads)
            kernel = FusedKernel(tables, range(len(tables)), cpu)
            assert kernel._compiled is not None
            for weight, values in zip(kernel.weights(), first, strict=True):
                weight.copy_(values)
            for _ in range(2):
                by_loop(kernel, given_lookups).backward(grad)
            found.append(kernel.weights())
    finally:
        torch.set_num_threads(before)
    column = first_id = 0
    for number, (table, (_, dim)) in enumerate(zip(tables, sizes, strict=True)):
        oracle = plain([table], [0])
        oracle.weights()[0].copy_(first[number])
        part = factors[first_id : first_id + len(ids[number])]
        for _ in range(2):
            of_table = lookups(ids[number], lengths[number], part, weighted)
            oracle.lookup(of_table).backward(grad[:, column : column + dim])
        torch.testing.assert_close(found[0][number], oracle.weights()[0], atol=2e-5, rtol=2e-5)
        assert torch.equal(found[0][number], found[1][number])
        first_id, column = first_id + len(ids[number]), column + dim


def test_the_shape_of_a_batch_decides() -> None:
    def faster(num_lookups: int, bags: int, length: int, num_tables: int, has_state: bool = False) -> bool:
        lengths = torch.full((num_lookups * bags,), length)
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        batch = lookups(ids, lengths, torch.ones(0), weighted=False)
        return FusedKernel.loop_is_faster(batch, num_lookups, num_tables, has_state)

    assert not faster(2, 5, 1, 2) and not faster(2, 300, 3, 2), "few tables, few ids per bag"
    assert faster(2, 300, 4, 2), "many ids per bag"
    assert faster(3, 500, 1, 2), "fbgemm is slow with several lookups of a table"
    assert faster(100, 64, 1, 100) and not faster(99, 64, 1, 99), "many tables of few bags"
    assert faster(10, 1000, 1, 10) and not faster(10, 999, 1, 10), "many ids"
    assert faster(2, 5, 1, 2, has_state=True), "fbgemm is slow with optimizer state"


def test_the_cost_of_an_update_does_not_grow_with_rows() -> None:
    spec, seconds = OptimizerSpec.from_fused_params({"optimizer": "rowwise_adagrad", "learning_rate": 0.1}), []
    generator = torch.Generator().manual_seed(0)
    for rows in (10_000, 10_000_000):
        config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])
        kind = EmbeddingComputeKernel.FUSED
        table = LocalTable(config=config, rows=Span(0, rows), cols=Span(0, 4), kernel=kind, optimizer=spec)
        kernel = FusedKernel([table], [0], torch.device("cpu"))
        assert kernel._compiled is not None
        ids = torch.randint(0, rows, (1000,), generator=generator)
        batch = lookups(ids, torch.full((100,), 10), torch.ones(0), weighted=False)
        grad = torch.ones(100, 4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        took = []
        for _ in range(50):
            out = by_loop(kernel, batch)
            start = time.perf_counter()
            out.backward(grad)
            took.append(time.perf_counter() - start)
        seconds.append(statistics.median(took))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 * 1024, "KiB beside the table"
    assert seconds[1] < 20 * seconds[0], seconds  # rows are a thousand times as many


def in_double(spec: OptimizerSpec, weight: torch.Tensor, grad: torch.Tensor, touched: torch.Tensor) -> torch.Tensor:
    """A table's first update in float64, given the sums of its rows' gradients."""
    step = spec.learning_rate * grad
    if spec.optimizer in (EmbOptimType.EXACT_ADAGRAD, EmbOptimType.ADAM):
        step = step / (grad.abs() + spec.eps)
    if spec.optimizer in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.PARTIAL_ROWWISE_ADAM):
        step = step / (grad.square().mean(1, keepdim=True).sqrt() + spec.eps)
    return torch.where(touched[:, None], weight - step, weight)


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("features", [[0, 1, 2, 3, 4], SEVERAL], ids=["one", "several"])
def test_the_loop_keeps_the_moments_of_adam(kind: EmbOptimType, features: list[int]) -> None:
    """Some updates by the loop and by torch's operators, of other rows in each: weights and both moments are alike."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    tables = [local_table(number, kind, 8) for number in range(5)]
    kernel, other = RowKernel(tables, features, cpu), plain(tables, features)
    assert kernel.compiled is not None
    other.matrix.weight_RD.copy_(kernel.matrix.weight_RD.uniform_(-1, 1, generator=generator))
    for batch in (2, 0, 3, 4):
        lengths = torch.randint(0, 3, (batch * len(features),), generator=generator)
        counts = lengths.view(len(features), batch).sum(1).tolist()
        ids = torch.cat(
            [torch.randint(ROWS[t], (n,), generator=generator) for t, n in zip(features, counts, strict=True)]
        )
        factors, grad = (
            torch.rand(len(ids), generator=generator),
            torch.randn(batch, 8 * len(features), generator=generator),
        )
        for each in (kernel, other):
            each.lookup(lookups(ids, lengths, factors, True)).backward(grad)
    torch.testing.assert_close(kernel.matrix.weight_RD, other.matrix.weight_RD, atol=1e-6, rtol=1e-5)
    for name, state in kernel.state.items():
        torch.testing.assert_close(state, other.state[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("kind", [*BY_FBGEMM, *ADAMS])
@settings(max_examples=6)
@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    dim=st.sampled_from([4, 8, 12, 60, 64, 100]),
    batch=st.integers(1, 40),
    longest=st.integers(0, 9),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_number_format_is_trained_as_in_double_precision(
    data_type: DataType,
    kind: EmbOptimType,
    rows: list[int],
    dim: int,
    batch: int,
    longest: int,
    weighted: bool,
    seed: int,
) -> None:
    """To 1e-6 for float32, and more where a row adds up many gradients; 16-bit weights are the nearest numbers."""
    generator, cpu = torch.Generator().manual_seed(seed), torch.device("cpu")
    spec = OptimizerSpec.from_fused_params({"optimizer": kind, "learning_rate": 0.1, "eps": 0.01})
    tables = [
        LocalTable(
            config=EmbeddingBagConfig(
                name=f"t{n}", num_embeddings=num, embedding_dim=dim, feature_names=[f"f{n}"], data_type=data_type
            ),
            rows=Span(0, num),
            cols=Span(0, dim),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=spec,
        )
        for n, num in enumerate(rows)
    ]
    kernel = make_pooling_kernel(tables, range(len(rows)), cpu)
    lengths = torch.randint(0, longest + 1, (len(rows), batch), generator=generator)
    ids = [torch.randint(0, num, (int(n),), generator=generator) for num, n in zip(rows, lengths.sum(1), strict=True)]
    factors = torch.rand(int(lengths.sum()), generator=generator)
    grad = torch.randn((batch, len(rows) * dim), generator=generator)
    before = []
    for weight in kernel.weights():
        weight.copy_(torch.rand(weight.shape, generator=generator))
        before.append(weight.double())
    given_lookups = lookups(torch.cat(ids), lengths.flatten(), factors, weighted)
    if isinstance(kernel, RowKernel):
        assert kernel.compiled is not None
        kernel.lookup(given_lookups).backward(grad)
        assert kernel.iteration == 1
    else:
        by_loop(kernel, given_lookups).backward(grad)
    half_step = {DataType.FP32: 1e-6, DataType.FP16: 2**-11, DataType.BF16: 2**-8}[data_type]
    first = 0
    for number, (of_table, weight) in enumerate(zip(ids, kernel.weights(), strict=True)):
        bags = torch.arange(batch).repeat_interleave(lengths[number])
        scale = factors[first : first + len(of_table)].double() if weighted else torch.ones(len(of_table)).double()
        part = grad[:, number * dim : (number + 1) * dim].double()[bags] * scale[:, None]
        sums = torch.zeros(rows[number], dim, dtype=torch.float64).index_add_(0, of_table, part)
        touched = torch.zeros(rows[number], dtype=torch.bool)
        touched[of_table] = True
        expected = in_double(spec, before[number], sums, touched)
        # A float32 sum rounds once for each gradient that a row gets.
        most = int(torch.bincount(of_table).max()) if len(of_table) else 0
        torch.testing.assert_close(weight.double(), expected, atol=1e-6 * max(1.0, most / 16), rtol=half_step)
        assert torch.equal(weight.double()[~touched], before[number][~touched])
        first += len(of_table)
