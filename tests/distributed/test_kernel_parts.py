"""What is known of every fused optimizer, and small parts of the kernels against the plainest way to say them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec._runtime.numba_loops import MIN_IDS, in_threads
from rayrec.distributed import EmbeddingComputeKernel, Span
from rayrec.distributed.kernel import (
    RULES,
    DecayMode,
    LocalTable,
    Lookups,
    OptimizerSpec,
    RowKernel,
    check_trainable,
    make_pooling_kernel,
    make_vector_kernel,
    pooling_group,
    rule_of,
    vector_group,
)
from rayrec.distributed.kernel.rows import DistinctRows, TouchedRows
from rayrec.modules import DataType, EmbeddingBagConfig

CPU = torch.device("cpu")
ROW, ELEMENT = True, False


@pytest.mark.parametrize(
    ("name", "states", "on_cpu", "decays", "on_cuda"),
    [
        ("sgd", [], True, ["l2", "decouple"], []),
        ("adagrad", [ELEMENT], True, ["l2", "decouple"], []),
        ("rowwise_adagrad", [ROW], True, ["l2", "decouple"], ["decouple", "l2"]),
        ("adam", [ELEMENT, ELEMENT], False, ["decouple", "l2"], ["decouple"]),
        ("partial_rowwise_adam", [ELEMENT, ROW], False, ["decouple", "l2"], ["decouple"]),
        ("lamb", [ELEMENT, ELEMENT], False, [], [None]),
        ("partial_rowwise_lamb", [ELEMENT, ROW], False, [], [None]),
        ("lars_sgd", [ELEMENT], False, [], [None]),
    ],
)
def test_what_is_known_of_an_optimizer(name: str, states: Any, on_cpu: bool, decays: Any, on_cuda: Any) -> None:
    spec = OptimizerSpec.from_fused_params({"optimizer": name})
    rule = spec.rule
    assert rule is RULES[name] is rule_of(rule.kind) is rule_of(rule.kind.value.upper())
    assert list(rule.rowwise.values()) == states and rule.fbgemm_on_cpu == on_cpu
    assert rule.corrects_bias == ("adam" in name or "lamb" in name)
    assert [mode.value for mode in rule.decay] == decays and spec.decay_mode == (decays[0] if decays else None)
    assert sorted((mode and mode.value for mode in rule.fbgemm_decay), key=str) == on_cuda
    assert rule.state_bytes == (4 * states.count(ROW), 4 * states.count(ELEMENT))


def test_what_a_spec_says_by_itself() -> None:
    spec = OptimizerSpec()
    assert spec == OptimizerSpec.from_fused_params(None) == OptimizerSpec.from_fused_params({"max_gradient": 1.0})
    assert spec == OptimizerSpec.from_fused_params({"gradient_clipping": False, "max_norm": 0.0})
    assert (spec.optimizer, spec.learning_rate, spec.eps) == (RULES["sgd"].kind, 0.01, 1e-8)
    assert (spec.beta1, spec.beta2, spec.momentum, spec.eta) == (0.9, 0.999, 0.9, 0.001)
    assert (spec.weight_decay, spec.weight_decay_mode, spec.stochastic_rounding, spec.replicas) == (
        0,
        None,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"gradient_clipping": True}, "'gradient_clipping' is not offered: fbgemm clips"),
        ({"max_norm": 1.0}, "'max_norm' is not offered"),
        ({"replicas": 1}, "'replicas' is not a setting; there are .*'stochastic_rounding'"),
        ({"momentum": 0.5}, "optimizer 'exact_sgd' has no 'momentum'; leave it out"),
        ({"optimizer": "adam", "eta": 0.5}, "optimizer 'adam' has no 'eta'"),
        ({"optimizer": "adagrad", "beta1": 0.5}, "optimizer 'exact_adagrad' has no 'beta1'"),
        ({"optimizer": "lamb", "weight_decay_mode": "l2"}, "weight_decay_mode='l2' must be none: its weight decay has"),
        ({"weight_decay_mode": "none", "weight_decay": 0.1}, "weight_decay_mode='none' with weight_decay=0.1 is not"),
        ({"weight_decay_mode": "cowclip"}, "weight_decay_mode='cowclip' with weight_decay=0.0 is not one of 'l2', 'de"),
        ({"optimizer": "rprop"}, "optimizer 'rprop' has no fused update for embedding tables; there are sgd, adagrad"),
    ],
)
def test_settings_that_a_rule_does_not_have_are_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        OptimizerSpec.from_fused_params(given)


def test_weight_decay_by_any_name() -> None:
    class Theirs:
        name = "L2"

    for text, mode in [("l2", "l2"), ("DECOUPLE", "decouple"), (Theirs(), "l2"), (DecayMode.L2, "l2"), (None, "l2")]:
        spec = OptimizerSpec.from_fused_params({"weight_decay_mode": text, "weight_decay": 0.1})
        assert spec.decay_mode == mode
    assert OptimizerSpec.from_fused_params({"weight_decay_mode": "none"}).weight_decay_mode is None


def test_torchs_optimizers_are_known_by_their_class() -> None:
    with pytest.raises(ValueError, match=r"Rprop has no fused update for embedding tables; there are \['SGD', "):
        OptimizerSpec.from_torch(torch.optim.Rprop, {})
    spec = OptimizerSpec.from_torch(torch.optim.AdamW, {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3})
    assert (spec.learning_rate, spec.beta1, spec.beta2, spec.eps, spec.weight_decay) == (0.5, 0.1, 0.2, 0.3, 0.01)
    assert spec.weight_decay_mode is DecayMode.DECOUPLE
    plain = OptimizerSpec.from_torch(torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.0})
    assert (plain.weight_decay_mode, plain.learning_rate) == (None, 0.5)
    with pytest.raises(ValueError, match=r"the settings \{'nesterov': True\} have no fused update"):
        OptimizerSpec.from_torch(torch.optim.SGD, {"lr": 0.5, "nesterov": True})


def tables(optimizer: OptimizerSpec | None) -> list[LocalTable]:
    """Of 3 and 2 rows, 4 columns wide."""
    return [
        LocalTable(
            config=EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=4, feature_names=[f"f{n}"]),
            rows=Span(0, rows),
            cols=Span(0, 4),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=optimizer,
        )
        for n, rows in enumerate((3, 2))
    ]


@pytest.mark.parametrize("optimizer", [OptimizerSpec(), OptimizerSpec(optimizer=RULES["adam"].kind), None])
@pytest.mark.parametrize("ids", [[[], []], [[2], []], [[], [1]], [[0, 2], [1]], [[2, 2, 1], [0, 1, 1, 0]]])
def test_every_id_has_its_own_vector(optimizer: OptimizerSpec | None, ids: list[list[int]]) -> None:
    kernel: Any = make_vector_kernel(tables(optimizer), [0, 1], CPU)
    for number, weight in enumerate(kernel.weights()):
        weight.data.copy_(torch.arange(weight.numel()).view_as(weight) + 100.0 * number)
    before = [weight.detach().clone() for weight in kernel.weights()]
    flat, lengths = torch.tensor([*ids[0], *ids[1]], dtype=torch.int64), [len(each) for each in ids]
    offsets = torch.tensor([0, lengths[0], sum(lengths)])
    found = kernel.lookup(Lookups(flat, offsets, None))
    wanted = [before[table][row] for table, rows in enumerate(ids) for row in rows]
    assert found.tolist() == [row.tolist() for row in wanted]
    if optimizer is None:  # its rows are left to the dense optimizer
        return
    found.sum().backward()
    touched = [
        {row for row in range(len(b)) if not torch.equal(a[row], b[row])}
        for a, b in zip(kernel.weights(), before, strict=True)
    ]
    assert touched == [set(each) for each in ids] and kernel.iteration == 1
    assert isinstance(kernel, RowKernel) == (optimizer is not None and optimizer.rule.kind is RULES["adam"].kind)


@pytest.mark.parametrize("optimizer", [OptimizerSpec(), OptimizerSpec(optimizer=RULES["adam"].kind), None])
def test_a_lookup_in_inference_mode_does_not_break_training_after_it(optimizer: OptimizerSpec | None) -> None:
    kernels: list[Any] = [make(tables(optimizer), [0, 1], CPU) for make in (make_pooling_kernel, make_vector_kernel)]
    for kernel in kernels:
        batch = Lookups(torch.tensor([2, 1]), torch.tensor([0, 1, 2]), None)
        with torch.inference_mode():
            kernel.lookup(Lookups(torch.tensor([1, 0]), torch.tensor([0, 1, 2]), None))
        out = kernel.lookup(batch)
        out.sum().backward()
        assert out.requires_grad and all(weight.grad is not None or weight.any() for weight in kernel.weights())


@pytest.mark.parametrize("make", [make_pooling_kernel, make_vector_kernel, RowKernel])
def test_rows_that_were_looked_up_for_training_are_marked_once(make: Callable[..., Any]) -> None:
    kernel = make(tables(OptimizerSpec()), [0, 1, 1], CPU)
    kernel.touched = TouchedRows(kernel.tables, [0, 1, 1], CPU)
    lookups = Lookups(torch.tensor([2, 0, 2, 1]), torch.tensor([0, 1, 3, 3, 3, 3, 4]), None)
    with torch.no_grad():
        kernel.lookup(lookups)
    assert [rows.tolist() for rows in kernel.touched.take()] == [[], []]
    kernel.lookup(lookups)
    assert [rows.tolist() for rows in kernel.touched.take()] == [[0, 2], [1]]
    assert kernel.touched.num_distinct(lookups.ids, [0, 3, 3], [3, 3, 4]) == 3
    assert [rows.tolist() for rows in kernel.touched.take()] == [[], []]
    nothing = torch.tensor([], dtype=torch.int64)
    kernel.lookup(Lookups(nothing, torch.zeros(4, dtype=torch.int64), None))
    assert [rows.tolist() for rows in kernel.touched.take()] == [[], []]


K, GPU = EmbeddingComputeKernel, torch.device("cuda")  # the GPU is only named: nothing is computed there


def config(dim: int = 8, data_type: DataType = DataType.FP32, features: int = 1) -> EmbeddingBagConfig:
    names = [f"f{n}" for n in range(features)]
    return EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=dim, feature_names=names, data_type=data_type)


def spec_of(name: str = "rowwise_adagrad", **settings: Any) -> OptimizerSpec:
    return OptimizerSpec.from_fused_params({"optimizer": name, "learning_rate": 0.1, **settings})


def local(table: EmbeddingBagConfig, optimizer: OptimizerSpec | None = None, kernel: K = K.FUSED) -> LocalTable:
    rows, cols = Span(0, table.num_embeddings), Span(0, table.embedding_dim)
    return LocalTable(config=table, rows=rows, cols=cols, kernel=kernel, optimizer=optimizer or spec_of())


@pytest.mark.parametrize(
    ("optimizer", "table", "trains"),
    [
        (spec_of(), config(), True),
        (spec_of(), config(data_type=DataType.BF16), False),
        (spec_of(), config(data_type=DataType.FP16), True),
        (spec_of(stochastic_rounding=True), config(data_type=DataType.FP16), True),
        (spec_of("adam", weight_decay=0.1), config(), True),
        (spec_of(), config(dim=6), True),
        *((spec_of(name), config(dim=6), len(set(RULES[name].rowwise.values())) < 2) for name in RULES),
    ],
)
def test_tables_in_a_gpus_host_memory_need_an_update_that_fbgemm_has(optimizer: Any, table: Any, trains: bool) -> None:
    for kernel in (K.FUSED_UVM, K.FUSED_UVM_CACHING):
        if trains:
            check_trainable(table, kernel, optimizer, GPU)
        else:
            with pytest.raises(ValueError, match=f"table 't': kernel '{kernel.value}' trains by fbgemm only"):
                check_trainable(table, kernel, optimizer, GPU)
        check_trainable(table, kernel, optimizer, CPU)
    for kernel in (K.FUSED, K.DENSE):
        check_trainable(table, kernel, optimizer, GPU)


def test_tables_share_a_kernel_where_they_are_trained_alike() -> None:
    def same(a: LocalTable, b: LocalTable, device: torch.device, group: Any = pooling_group) -> bool:
        return bool(group(a, device) == group(b, device))

    narrow, wide, odd = (local(config(dim)) for dim in (8, 16, 6))
    adagrad = [local(config(dim), spec_of("adagrad")) for dim in (8, 6)]
    for device in (CPU, GPU):
        assert same(narrow, wide, device) and same(*adagrad, device)
        assert not same(narrow, odd, device), "a padded width has its own scale where state has one number a row"
    shared = local(config(8, features=2))
    assert same(narrow, shared, CPU) and same(narrow, shared, GPU)
    plain = [local(config(dim), spec_of(weight_decay=0.1)) for dim in (8, 16)]
    assert not same(*plain, CPU), "one matrix has one width"
    assert not same(narrow, wide, CPU, vector_group) and same(narrow, local(config(8)), CPU, vector_group)
    half = local(config(8, DataType.FP16))
    uvm = local(config(8), kernel=K.FUSED_UVM)
    for device in (CPU, GPU):
        assert not same(narrow, half, device) and same(narrow, uvm, device)
        assert not same(narrow, uvm, device, vector_group)


@settings(max_examples=150)
@given(
    count=st.integers(0, 5000),
    rows=st.sampled_from([1, 2, 200, 2048, 2049, 10**6, 2**32 - 1, 2**32, 2**40]),
    seed=st.integers(0, 9),
)
def test_rows_are_grouped_as_by_a_stable_sort(count: int, rows: int, seed: int) -> None:
    drawn = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))
    drawn = torch.cat([drawn, drawn[: count // 2]])
    groups, (ordered, order) = DistinctRows.of(drawn), torch.sort(drawn, stable=True)
    assert torch.equal(groups.order, order)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    assert torch.equal(groups.distinct, distinct)
    assert torch.equal(groups.starts, counts.cumsum(0) - counts)


@pytest.mark.parametrize(
    "sizes, threads, parts",
    [
        ([1, 1], 2, [1, 1]),
        ([1] * 4, 2, [2, 2]),
        ([1] * 4, 4, [1] * 4),
        ([1] * 8, 8, [1] * 8),
        ([4, 1, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1, 1, 4], 2, [4, 1]),
        ([9], 4, [1]),
        ([3, 3, 2], 2, [1, 2]),
    ],
)
def test_work_is_cut_at_the_nearest_edges(sizes: list[int], threads: int, parts: list[int]) -> None:
    ranges: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        in_threads(lambda start, stop: ranges.append((start, stop)) or -1, np.array(sizes) * MIN_IDS * 8)  # type: ignore[func-returns-value]
    finally:
        torch.set_num_threads(before)
    assert [stop - start for start, stop in sorted(ranges)] == parts


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "rowwise_adagrad"])
def test_sequences_are_trained_by_the_compiled_loop_as_by_formulas(optimizer: str, data_type: DataType) -> None:
    """Two tables of one kernel, ids that repeat, two ranks' lookups side by side."""
    spec = OptimizerSpec.from_fused_params({"optimizer": optimizer, "learning_rate": 0.1})
    tables = [
        LocalTable(
            config=EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name], data_type=data_type
            ),
            rows=Span(0, rows),
            cols=Span(0, 4),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=spec,
        )
        for name, rows in (("a", 5), ("b", 9))
    ]
    by_loop, by_formula = (RowKernel(tables, [0, 1, 0, 1], CPU, pooled=False) for _ in range(2))
    assert by_loop.compiled is not None
    by_formula.compiled = None  # type: ignore[misc]
    generator = torch.Generator().manual_seed(1)
    start = torch.rand(by_loop.matrix.weight_RD.shape, generator=generator)
    for kernel in (by_loop, by_formula):
        kernel.matrix.weight_RD.copy_(start)
    for _ in range(3):
        ids = torch.cat([torch.randint(0, rows, (6,), generator=generator) for rows in (5, 9, 5, 9)])
        grad = torch.rand(24, 4, generator=generator)
        lookups = Lookups(ids, torch.arange(0, 25, 6), None)
        vectors = [kernel.lookup(lookups) for kernel in (by_loop, by_formula)]
        torch.testing.assert_close(*vectors, atol=1e-5, rtol=2e-2 if data_type is DataType.BF16 else 1e-5)
        for each in vectors:
            each.backward(grad)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if data_type is DataType.BF16 else {"atol": 1e-5, "rtol": 1e-5}
    for one, other in zip(by_loop.weights(), by_formula.weights(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    for states, others in zip(by_loop.states(), by_formula.states(), strict=True):
        for name, state in states.items():
            torch.testing.assert_close(state, others[name], **tolerance)
