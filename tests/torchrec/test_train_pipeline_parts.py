"""Pipelines by TorchRec's names: what holds where nothing is said, and the parts that need no ranks."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.distributed import DistributedModelParallel, ShardingEnv
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.distributed import train_pipeline as home
from rayrec.torchrec.distributed.embedding_types import ShardedEmbeddingModule
from rayrec.torchrec.distributed.sharded_module import ShardedModule
from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import record_stream
from rayrec.torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

CPU = torch.device("cpu")
COPIES = {"enable_inplace_copy_batch": False, "free_features_storage_early": False, "clear_data_dist_inputs": False}
OURS = {"execute_all_batches": True, "apply_jit": False, "pipeline_postproc": True, **COPIES}
CONTEXT = {"context_type": home.TrainPipelineContext}
LOOKUPS = {"strict": False, "emb_lookup_stream": "data_dist", "embedding_lookup_after_data_dist": False}


class Line(nn.Module):
    """(loss, the batch's sum times the weight)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self.weight * batch.sum(), float((self.weight * batch.sum()).detach())


def batches(count: int, first: int = 1) -> Iterator[torch.Tensor]:
    return iter([torch.tensor([float(number)]) for number in range(first, first + count)])


def outputs(pipeline: Any, source: Iterator[Any]) -> list[Any]:
    found = []
    while True:
        try:
            found.append(pipeline.progress(source))
        except StopIteration:
            return found


def made(kind: Callable[..., Any], rate: float = 0.0, **more: Any) -> Any:
    model = Line()
    return kind(model, torch.optim.SGD(model.parameters(), lr=rate), CPU, **more)


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (home.TrainPipelineBase, {"enable_inplace_copy_batch": False}),
        (
            home.TrainPipelineSparseDist,
            {
                "execute_all_batches": True,
                "apply_jit": False,
                "pipeline_postproc": False,
                "dmp_collection_sync_interval_batches": 1,
                "enqueue_batch_after_forward": False,
                **COPIES,
                **CONTEXT,
            },
        ),
        (home.TrainPipelineFusedSparseDist, OURS | LOOKUPS | {"enqueue_batch_after_forward": False}),
        (
            TrainPipelineSemiSync,
            OURS
            | {
                "start_batch": 900,
                "stash_gradients": False,
                "strict": False,
                "dmp_collection_sync_interval_batches": 1,
            },
        ),
        (home.PrefetchTrainPipelineSparseDist, OURS),
        (home.TrainPipelineSparseDistLite, {"apply_jit": False, "pipeline_postproc": False, **COPIES, **CONTEXT}),
        (home.TrainPipelinePT2, {}),
    ],
)
def test_pipelines_train_on_every_batch_by_default(kind: Any, defaults: dict[str, Any]) -> None:
    given = inspect.signature(kind).parameters.values()
    assert {p.name: p.default for p in given if p.default not in (None, p.empty)} == defaults
    settings = {"compile_configs": home.TorchCompileConfig(compile_on_iter=None)} if "PT2" in kind.__name__ else {}
    assert outputs(made(kind, 0.25, **settings), batches(3)) == [1.0, 0.75 * 2, 0.25 * 3]  # the gradient is the batch


@pytest.mark.parametrize(
    ("kind", "make", "defaults"),
    [
        (
            home.TorchCompileConfig,
            lambda: made(home.TrainPipelinePT2),
            {"fullgraph": False, "backend": "inductor", "compile_on_iter": 3},
        ),
        (home.StagedTrainPipeline, lambda: home.StagedTrainPipeline([]), {"debug_mode": False}),
        (
            home.SparseDataDistUtil,
            lambda: home.SparseDataDistUtil(Line(), None),
            {"apply_jit": False, "pipeline_postproc": False},
        ),
        (home.DataLoadingThread, lambda: home.DataLoadingThread(CPU, batches(1), False), {"memcpy_stream_priority": 0}),
        (
            home.GradientAccumulationConfig,
            home.GradientAccumulationConfig,
            {"is_enabled": False, "num_steps": 1, "num_warmup_steps": 1},
        ),
        (
            home.TrainPipeline,
            home.TrainPipeline,
            {"features": home.sparse_features, "send_ahead": True},
        ),
    ],
)
def test_defaults_of(kind: Any, make: Callable[[], Any], defaults: dict[str, Any]) -> None:
    make()
    given = inspect.signature(kind).parameters.values()
    assert {p.name: p.default for p in given if p.default not in (None, p.empty)} == defaults


def test_two_batches_wait_for_the_next_iterator_where_not_all_are_executed() -> None:
    pipeline = made(home.TrainPipelineSparseDist, execute_all_batches=False)
    assert outputs(pipeline, batches(4)) == [1.0, 2.0]
    assert outputs(pipeline, batches(1, 5)) == [3.0]
    pipeline.reset()
    assert outputs(pipeline, batches(3, 7)) == [7.0]


def test_another_model_goes_on() -> None:
    pipeline, other = made(home.TrainPipelineSparseDist), Line()
    model = pipeline.detach()
    pipeline.attach()
    assert pipeline.detach() is model
    pipeline.attach(other)
    assert pipeline.detach() is other


def test_an_iterator_that_has_ended_is_through_until_a_reset() -> None:
    for kind in (home.TrainPipelineBase, home.EvalPipelineSparseDist):
        pipeline = made(kind, 0.5)
        first = outputs(pipeline, batches(2))
        assert first == ([1.0, 1.0] if kind is home.TrainPipelineBase else [1.0, 2.0])
        assert outputs(pipeline, batches(2)) == []
        pipeline.reset()
        assert len(outputs(pipeline, batches(2))) == 2
        pipeline.reset()
        assert pipeline.progress(batches(1)) is not None


def test_a_model_in_evaluation_is_not_trained() -> None:
    pipeline = made(home.TrainPipeline, 0.5)
    pipeline._model.eval()
    assert outputs(pipeline, batches(2)) == [1.0, 2.0]
    assert home.TrainPipeline(Line(), None, CPU).progress(batches(1)) == 1.0, "it needs no optimizer of its own"


def test_compilation_begins_at_its_step() -> None:
    seen: list[Any] = []

    class Noted(Line):
        def compile(self, **settings: Any) -> None:
            seen.append(settings)

    model = Noted()
    config = home.TorchCompileConfig(fullgraph=True, dynamic=False, backend="eager", compile_on_iter=2)
    told = ([lambda m: seen.append(m)] * 2)[:2]
    pipeline = home.TrainPipelinePT2(
        model, torch.optim.SGD(model.parameters(), lr=0.0), CPU, config, *told, lambda b: 2 * b
    )
    source = batches(4)
    assert [pipeline.progress(source) for _ in range(2)] == [2.0, 4.0] and seen == []
    assert [pipeline.progress(source) for _ in range(2)] == [6.0, 8.0]
    assert seen == [model, {"fullgraph": True, "dynamic": False, "backend": "eager"}, model]


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))


def test_a_batchs_features_are_found() -> None:
    given, other = kjt(), kjt()

    class Of:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    assert home.sparse_features(Of(sparse=given, x=other)) is given
    assert home.sparse_features(Of(x=other, sparse_features=given)) is given
    assert home.sparse_features(Of(a=1, b=given, c=other)) is given
    assert home.sparse_features((1, given, other)) is given and home.sparse_features([given]) is given
    assert home.sparse_features(given) is given
    with pytest.raises(ValueError, match=r"Of has no KeyedJaggedTensor; set TrainPipeline\(features=…\)"):
        home.sparse_features(Of(a=1))
    with pytest.raises(ValueError, match="int has no KeyedJaggedTensor"):
        home.sparse_features(3)


@pytest.mark.parametrize("set_to_none", [(), (True,), (False,)])
def test_gradients_are_cleared_after_a_step_and_only_then(set_to_none: tuple[bool, ...]) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pipeline = home.TrainPipelineBase(model, optimizer, CPU)
    wrapped = home.GradientAccumulationWrapper(pipeline, optimizer, model, home.GradientAccumulationConfig(num_steps=2))
    one = wrapped.optimizer_wrapper
    model.weight.grad = torch.tensor(3.0)
    one.zero_grad(*set_to_none)
    assert (model.weight.grad is None) == (set_to_none != (False,))
    model.weight.grad = torch.tensor(5.0)
    one.zero_grad()
    assert model.weight.grad.item() == 5.0, "it was cleared once"
    one.step()
    one.zero_grad()
    assert (model.weight.item(), model.weight.grad.item()) == (1.0, 5.0), "the first of two batches"
    wrapped.set_step(1)
    one.step()
    assert (model.weight.item(), wrapped.current_step) == (1.0 - 2.5, 1)
    one.zero_grad()
    assert model.weight.grad is None
    assert one.param_groups is optimizer.param_groups and wrapped._optimizer is one


@pytest.mark.parametrize(
    ("steps", "count", "last", "weight"),
    [
        (1, 3, None, 1 - 0.5 * (1 + 2 + 3)),
        (2, 2, None, 1 - 0.5 * (1 + 2)),
        (2, 3, None, 1 - 0.5 * (1 + 2 + 3)),  # the third one's step comes at the end
        (3, 5, 2, 1 - 0.5 * (1 + 2 + 3 + 4 + 5)),
        (4, 3, 1, 1 - 0.5 * (1 + 2 + 3)),
    ],
)
def test_every_batchs_gradient_is_stepped_on_once(steps: int, count: int, last: int | None, weight: float) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = home.GradientAccumulationConfig(num_steps=steps)
    assert config.is_enabled == (steps > 1)
    pipeline = home.TrainPipelineBase(model, optimizer, CPU)
    wrapped = home.GradientAccumulationWrapper(pipeline, optimizer, model, config)
    source = batches(count)
    for number in range(1, count + 1):
        wrapped.progress(source, is_last_batch=number == last)
    with pytest.raises(StopIteration):
        wrapped.progress(source)
    assert model.weight.item() == pytest.approx(weight) and wrapped.current_step == (count if steps > 1 else 0)
    wrapped.reset()
    assert wrapped.current_step == 0 and len(outputs(wrapped, batches(2))) == 2


@pytest.mark.parametrize("name", ["num_steps", "num_warmup_steps"])
def test_a_step_has_a_batch_at_least(name: str) -> None:
    assert not home.GradientAccumulationConfig(**{name: 1}).is_enabled
    assert home.GradientAccumulationConfig(is_enabled=True).is_enabled
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        home.GradientAccumulationConfig(**{name: 0})


@pytest.mark.parametrize(("warm_up", "exchanged"), [(1, [1, 0, 1, 0, 0, 1, 1]), (3, [1, 1, 1, 0, 0, 1, 1])])
def test_gradients_meet_in_the_first_batches_and_at_each_step(warm_up: int, exchanged: list[int]) -> None:
    """Three batches a step; the last batch is said to be that."""
    config = home.GradientAccumulationConfig(num_steps=3, num_warmup_steps=warm_up)
    wrapped = home.GradientAccumulationWrapper(made(home.TrainPipelineBase), None, Line(), config)  # type: ignore[arg-type]
    found = []
    for step in range(6):
        wrapped.set_step(step)
        found.append(int(wrapped._exchanges()))
    assert found == exchanged[:6]


def loading(source: Iterator[Any]) -> Any:
    thread = home.DataLoadingThread(CPU, source, False)
    thread.start()
    return thread


def test_a_thread_loads_one_batch_ahead_until_it_is_stopped() -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise OSError("the disk is gone")

    thread = loading(failing())
    assert float(thread.get_next_batch()) == 1.0
    for _ in range(2):  # the second call waited forever
        with pytest.raises(OSError, match="the disk is gone"):
            thread.get_next_batch()
    thread = loading(batches(2))
    assert [float(thread.get_next_batch()) for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)
    assert thread.get_next_batch() is None
    pulled: list[int] = []

    def endless() -> Iterator[torch.Tensor]:
        while True:
            pulled.append(1)
            yield torch.ones(1)

    thread = loading(endless())
    assert thread.get_next_batch() is not None
    thread.stop()
    thread.join(10)
    assert not thread.is_alive() and len(pulled) <= 3


def test_neither_a_slow_reader_nor_a_slow_source_loses_batches() -> None:
    def slow() -> Iterator[torch.Tensor]:
        time.sleep(0.15)
        yield from batches(3)

    thread = loading(slow())
    found = [thread.get_next_batch()]
    time.sleep(0.15)  # longer than either looks whether it was stopped
    found += [thread.get_next_batch() for _ in range(2)]
    assert [batch.item() for batch in found] == [1.0, 2.0, 3.0] and thread.get_next_batch() is None


class Number:
    def __init__(self, value: int) -> None:
        self.value = value


def test_stages_are_filled_once_and_flushed_when_asked() -> None:
    said: list[str] = []

    def stage(name: str, factor: int) -> home.PipelineStage:
        def run(batch: Number) -> Number:
            said.append(f"{name}{batch.value}")
            return Number(batch.value * factor)

        return home.PipelineStage(name, run, None, lambda: said.append(f"filled {name}"), lambda: said.append("end"))

    pipeline = home.StagedTrainPipeline([stage("a", 10), stage("b", 100)])
    source = iter([Number(value) for value in range(1, 5)])
    assert pipeline.num_stages == 2
    assert pipeline.progress(source).value == 1000
    assert said == ["a1", "filled a", "b10", "filled b", "a2", "filled a", "a3", "b20"]
    pipeline.set_flush(True)
    assert [pipeline.progress(source).value for _ in range(2)] == [2000, 3000]
    said.clear()
    assert pipeline.progress(source).value == 4000, "the flush has ended, and the fourth batch came"
    assert said.count("filled a") == 2 and said[-1] == "end"
    assert pipeline.progress(source) is None
    pipeline.reset()
    assert pipeline.progress(iter([Number(7)])).value == 7000
    plain = home.StagedTrainPipeline([home.PipelineStage("a", lambda batch: batch, None)])
    assert [plain.progress(iter([Number(1)])).value, plain.progress(iter([]))] == [1, None]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        out: torch.Tensor = self.ebc(features).values()
        return out


def staged() -> tuple[DistributedModelParallel, home.StagedTrainPipeline, Callable[[], int]]:
    """A model on one rank, a pipeline that sends its ids ahead, and a count of those that were not taken."""
    model = DistributedModelParallel(Bags(), ShardingEnv.from_local(1, 0), CPU)
    util = home.SparseDataDistUtil(model, None)
    stages = [
        home.PipelineStage("copy", lambda batch: batch.to(CPU), None),
        home.PipelineStage("ids", lambda batch: util.start_sparse_data_dist(batch), None),
    ]
    (collection,) = model.sharded_modules().values()
    return model, home.StagedTrainPipeline(stages), lambda: len(collection.ids_ahead._ahead)


def test_a_staged_pipeline_keeps_no_ids_that_were_sent_ahead() -> None:
    model, pipeline, ahead = staged()
    source = iter([kjt() for _ in range(6)])
    while (batch := pipeline.progress(source)) is not None:  # evaluation: ids were sent with gradients on
        with torch.no_grad():
            model(batch)
        assert ahead() <= pipeline.num_stages
    assert ahead() == 0
    pipeline.reset()
    source = iter([kjt() for _ in range(6)])
    assert pipeline.progress(source) is not None and ahead() > 0
    pipeline.reset()
    assert ahead() == 0
    assert pipeline.progress(source) is not None and ahead() > 0
    pipeline.flush_end()
    assert ahead() == 0
    util = home.SparseDataDistUtil(model, None)
    util.start_sparse_data_dist(kjt())
    assert ahead() == 1 and util.detach() is model and ahead() == 0


def test_sharded_collections_are_sharded_modules() -> None:
    (collection,) = staged()[0].sharded_modules().values()
    assert isinstance(collection, ShardedModule) and isinstance(collection, ShardedEmbeddingModule)


def test_a_batch_of_any_kind_is_recorded_on_a_stream() -> None:
    seen: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_stream(self, stream: Any) -> None:
            seen.append(f"{self.name} {stream}")

    @dataclass(frozen=True, slots=True)
    class Slots:
        part: Part
        number: int

    plain = Number(3)
    plain.part = Part("attribute")  # type: ignore[attr-defined]
    stream: Any = "s"
    record_stream([Part("item"), {"key": Part("value")}, Slots(Part("field"), 1), plain, torch.ones(1), None], stream)
    assert seen == ["item s", "value s", "field s", "attribute s"]
