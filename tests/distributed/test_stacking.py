"""Tables that are one table to fbgemm are looked up, trained and shown as tables of their own."""

from __future__ import annotations

import random
from functools import partial
from itertools import count

import pytest
import torch

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel import EmbOptimType, FusedKernel, LocalTable, Lookups, OptimizerSpec
from rayrec.distributed.kernel.layout_choice import AGAIN, MOST_ROUNDS, ROUNDS, WARM_UP, LayoutChoice, Way, fastest
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Shard, Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig

ROWS = [3, 5, 4, 2, 6]
ONE_WIDTH, TWO_WIDTHS = [8] * 5, [16, 16, 16, 8, 8]
TRIAL = 2 * (WARM_UP + ROUNDS)  # batches of one size until a layout is chosen


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


@pytest.mark.parametrize("features", [[0, 1, 2, 3, 4], [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]], ids=["one", "several"])
@pytest.mark.parametrize(
    "kind", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
)
@pytest.mark.parametrize("weighted, dims", [(False, ONE_WIDTH), (True, ONE_WIDTH), (True, TWO_WIDTHS)])
def test_whatever_layout_is_chosen_tables_train_to_the_last_bit_alike(
    kind: EmbOptimType, features: list[int], weighted: bool, dims: list[int]
) -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    tables = [local_table(number, kind, dims[number]) for number in range(5)]
    chosen, *fixed = (FusedKernel(tables, features, cpu) for _ in range(3))
    ways = len(fixed[0]._ways)
    assert ways == (1 if len(features) > 5 and kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD else 2)
    for way, kernel in enumerate(fixed):
        kernel._choice._chosen = dict.fromkeys(range(64), way % ways)
    weights, states = chosen.weights(), chosen.states()  # views, which must stay true whatever is chosen
    for number, weight in enumerate(weights):
        weight.copy_(torch.rand(weight.shape, generator=generator))
        for kernel in fixed:
            kernel.weights()[number].copy_(weight)
    for batch in (2, 0, *[3] * (TRIAL + 2)):
        lengths = torch.randint(0, 3, (batch * len(features),), generator=generator)
        counts = lengths.view(len(features), batch).sum(1).tolist()
        ids = [torch.randint(0, ROWS[t], (n,), generator=generator) for t, n in zip(features, counts, strict=True)]
        batch_lookups = lookups(torch.cat(ids), lengths, torch.rand(sum(counts), generator=generator), weighted)
        grad = torch.rand((batch, sum(dims[table] for table in features)), generator=generator)
        outputs = []
        for kernel in (chosen, *fixed):
            kernel.learning_rate *= 0.9
            outputs.append(kernel.pooled(batch_lookups))
            outputs[-1].backward(grad)
        for kernel, output in zip(fixed, outputs[1:], strict=True):
            torch.testing.assert_close(output, outputs[0], atol=0, rtol=0)
            torch.testing.assert_close(kernel.weights(), weights, atol=0, rtol=0)
            torch.testing.assert_close(kernel.states(), states, atol=0, rtol=0)
    assert chosen.iteration == TRIAL + 4


def lookups(ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor, weighted: bool) -> Lookups:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Lookups(ids, offsets, weights if weighted else None)


class Work:
    """Two ways to multiply by one, on a clock of their own."""

    def __init__(self, forward: tuple[float, float], backward: tuple[float, float]) -> None:
        self.now = 0.0
        self.taken: list[int] = []
        self._forward, self._backward = forward, backward

    def clock(self) -> float:
        return self.now

    @property
    def ways(self) -> list[Way]:
        return [partial(self._do, way) for way in (0, 1)]

    def _do(self, way: int) -> tuple[torch.Tensor, torch.autograd.graph.Node | None]:
        self.taken.append(way)
        self.now += self._forward[way]
        work, seconds = self, self._backward[way]

        class Multiply(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
                work.now += seconds
                return grad

        out = Multiply.apply(torch.ones(1, requires_grad=torch.is_grad_enabled()))
        return out * 1, out.grad_fn


def test_the_layout_that_is_faster_over_forward_and_backward_is_chosen_for_each_size() -> None:
    work = Work((1.0, 2.0), (9.0, 3.0))
    choice = LayoutChoice(2, work.clock)
    for _ in range(TRIAL):
        choice.run(1000, work.ways).backward()
        work.now += 100  # what happens between batches does not count
    assert sorted(work.taken) == [0] * (TRIAL // 2) + [1] * (TRIAL // 2)
    work.taken.clear()
    for size in (1000, 600, 1023):
        choice.run(size, work.ways).backward()
    assert work.taken == [1, 1, 1]
    choice.run(10_000, work.ways).backward()  # batches of another size are timed anew
    assert work.taken[-1] == 0


def test_a_choice_is_made_again_when_ids_have_changed() -> None:
    work = Work((5.0, 1.0), (5.0, 1.0))
    choice = LayoutChoice(2, work.clock)
    for _ in range(TRIAL + AGAIN):
        choice.run(1000, work.ways).backward()
    assert set(work.taken[-AGAIN:]) == {1}
    work._forward, work._backward = (1.0, 5.0), (1.0, 5.0)
    for _ in range(TRIAL + AGAIN):
        choice.run(1000, work.ways).backward()
    assert set(work.taken[-AGAIN // 2 :]) == {0}


def test_a_slow_moment_decides_nothing() -> None:
    work = Work((1.0, 1.1), (1.0, 1.1))
    choice = LayoutChoice(2, work.clock)
    for number in range(TRIAL):
        out = choice.run(5, work.ways)
        work.now += 100  # before backward begins
        if number in (4, 6):
            work.now += 1000
        out.backward()
    work.taken.clear()
    choice.run(5, work.ways)
    assert work.taken == [0]


def disturbed(kind: str, draw: random.Random, rounds: int) -> list[float]:
    """By how much each of so many times is too long, two a round."""
    match kind:
        case "now and then":
            return [draw.uniform(1.2, 4) if draw.random() < 0.2 else 1 for _ in range(2 * rounds)]
        case "by another program":
            busy, found = draw.random() < 0.5, []
            for _ in range(2 * rounds):
                busy ^= draw.random() < 0.1
                found.append(1.9 if busy else 1.0)
            return found
    return [1 + 0.3 * (draw.paretovariate(1.5) - 1) for _ in range(2 * rounds)]


@pytest.mark.parametrize("kind, rate", [("now and then", 0.0), ("by another program", 0.01), ("heavily", 0.03)])
@pytest.mark.parametrize("better", [0, 1])
def test_a_layout_that_is_a_tenth_slower_is_hardly_ever_chosen_on_a_busy_machine(
    kind: str, rate: float, better: int
) -> None:
    wrong, draw, trials = 0, random.Random(7), 300
    for _ in range(trials):
        noise = disturbed(kind, draw, MOST_ROUNDS)
        seconds = [1.0 if way == better else 1.1 for way in (0, 1)]
        times = [[factor * seconds[way] for factor in noise[way::2]] for way in (0, 1)]
        found = next(f for n in count(ROUNDS) if (f := fastest([of_way[:n] for of_way in times])) is not None)
        wrong += found != better
    assert wrong <= rate * trials


def test_layouts_that_are_as_good_as_each_other_take_turns_for_longer() -> None:
    assert fastest([[1.0] * (ROUNDS - 1), [2.0] * (ROUNDS - 1)]) is None
    assert fastest([[1.0] * ROUNDS, [2.0] * (ROUNDS + 1)]) == 0
    close = [[1.02] * MOST_ROUNDS, [1.0] * MOST_ROUNDS]
    assert fastest([of_way[: MOST_ROUNDS - 1] for of_way in close]) is None
    assert fastest(close) == 1


def test_a_batch_without_backward_is_neither_timed_nor_counted() -> None:
    work = Work((5.0, 1.0), (5.0, 1.0))
    choice = LayoutChoice(2, work.clock)
    with torch.no_grad():
        for _ in range(3 * TRIAL):
            choice.run(7, work.ways)
    assert set(work.taken) == {0}
    work.taken.clear()
    for _ in range(TRIAL):
        choice.run(7, work.ways).backward()
    assert set(work.taken) == {0, 1}


def test_weights_are_written_back_and_the_cache_emptied_before_anyone_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=8, feature_names=["f"])
    shards = (Shard(table="t", rows=Span(0, 3), cols=Span(0, 8), rank=0),)
    plan = {"t": ParameterSharding(sharding_type="table_wise", compute_kernel="fused", shards=shards)}
    module = EmbeddingBagCollection([config])
    sharded = EmbeddingBagCollectionSharder().shard(module, plan, ShardingEnv.from_local(1, 0), torch.device("cpu"))
    (kernel,), table = sharded.kernels(), sharded.tables()["t"]
    assert isinstance(kernel, FusedKernel)
    calls: list[str] = []
    monkeypatch.setattr(kernel._tbe, "flush", lambda: calls.append("flush"))
    monkeypatch.setattr(kernel._tbe, "reset_cache_states", lambda: calls.append("reset"))
    for use in (table.state_dict, lambda: table.load_state_dict({"weight": torch.ones(3, 8)})):
        calls.clear()
        use()
        assert calls == ["flush", "reset"]
    out = kernel.pooled(lookups(torch.tensor([1]), torch.tensor([1]), torch.ones(1), weighted=False))
    calls.clear()
    table.state_dict()
    assert calls == ["flush"]  # the backward under way writes into the cache
    out.sum().backward()
