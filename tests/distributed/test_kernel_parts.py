"""What is known of every fused optimizer, and small parts of the kernels against the plainest way to say them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import EmbeddingComputeKernel, Span
from rayrec.distributed.kernel import (
    RULES,
    LocalTable,
    Lookups,
    OptimizerSpec,
    make_pooling_kernel,
    make_vector_kernel,
    optimizer_formulas,
    rule_of,
)
from rayrec.distributed.kernel.dense_kernel import DenseKernel
from rayrec.distributed.kernel.optimizer_formulas import make_state
from rayrec.distributed.kernel.optimizer_rules import DecayMode
from rayrec.distributed.kernel.optimizer_spec import twin
from rayrec.distributed.kernel.row_kernel import RowKernel
from rayrec.distributed.kernel.rows import DistinctRows, TouchedRows
from rayrec.modules import EmbeddingBagConfig

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
    assert rule.corrects_bias == ("adam" in name or "lamb" in name) and rule.kind in optimizer_formulas._FORMULAS
    assert [mode.value for mode in rule.decay] == decays and spec.decay_mode == (decays[0] if decays else None)
    assert sorted((mode and mode.value for mode in rule.fbgemm_decay), key=str) == on_cuda
    assert rule.state_bytes == (4 * states.count(ROW), 4 * states.count(ELEMENT))
    made = make_state(spec, 5, 3, CPU)
    assert [list(state.shape) for state in made.values()] == [[5] if per_row else [5, 3] for per_row in states]
    assert not any(state.any() for state in made.values())


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
    known = {
        torch.optim.SGD: ("sgd", "l2"),
        torch.optim.Adagrad: ("adagrad", "l2"),
        torch.optim.Adam: ("adam", "l2"),
        torch.optim.AdamW: ("adam", "decouple"),
    }
    assert {kind: (twin(kind)[0], twin(kind)[1]) for kind in known} == {
        kind: (RULES[name], mode) for kind, (name, mode) in known.items()
    }
    with pytest.raises(ValueError, match=r"Rprop has no fused update for embedding tables; there are \['SGD', "):
        twin(torch.optim.Rprop)
    spec = OptimizerSpec.from_torch(torch.optim.AdamW, {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3})
    assert (spec.learning_rate, spec.beta1, spec.beta2, spec.eps, spec.weight_decay) == (0.5, 0.1, 0.2, 0.3, 0.01)
    assert spec.weight_decay_mode is DecayMode.DECOUPLE
    plain = OptimizerSpec.from_torch(torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.0})
    assert (plain.weight_decay_mode, plain.learning_rate) == (None, 0.5)
    with pytest.raises(ValueError, match=r"the settings \{'nesterov': True\} have no fused update"):
        OptimizerSpec.from_torch(torch.optim.SGD, {"lr": 0.5, "nesterov": True})


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=9), st.booleans(), st.booleans())
def test_equal_rows_are_added_up(rows: list[int], picked: bool, weighted: bool) -> None:
    count = len(rows)
    source = torch.tensor([(3 * n) % 4 for n in range(count)], dtype=torch.int64) if picked else None
    factors = torch.arange(count) + 1.0 if weighted else None
    grads = torch.arange(2.0 * max(4, count)).view(-1, 2) if picked else torch.arange(2.0 * count).view(-1, 2)
    groups = DistinctRows.of(torch.tensor(rows, dtype=torch.int64))
    assert groups.distinct.tolist() == sorted(set(rows))
    assert groups.order.tolist() == sorted(range(count), key=lambda n: rows[n]), "equal ones as they came"
    wanted = {row: torch.zeros(2) for row in sorted(set(rows))}
    for n, row in enumerate(rows):
        wanted[row] += grads[int(source[n]) if source is not None else n] * (n + 1 if weighted else 1)
    found = groups.sum(grads, source, factors)
    assert found.shape == (len(wanted), 2) and found.tolist() == [each.tolist() for each in wanted.values()]


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
    if isinstance(kernel, DenseKernel):
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
    assert [rows.tolist() for rows in kernel.touched.take()] == [[], []]
    nothing = torch.tensor([], dtype=torch.int64)
    kernel.lookup(Lookups(nothing, torch.zeros(4, dtype=torch.int64), None))
    assert [rows.tolist() for rows in kernel.touched.take()] == [[], []]
