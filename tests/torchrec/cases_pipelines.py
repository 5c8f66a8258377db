"""Cases of the pipelines that are driven by `progress`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import one_rank
from tests.torchrec.cases_modules import fill, tables
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


class Task(nn.Module):
    """(loss, output) of a tensor batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(batch)
        return out.square().mean(dim=0), out.detach()


def batches(count: int) -> list[torch.Tensor]:
    return [torch.sin(torch.arange(6.0) + step).view(2, 3) for step in range(count)]


def driven(rec: Package, kind: str, train: bool = True) -> Any:
    model = fill(Task()).train(train)
    make = getattr(rec("distributed.train_pipeline"), kind)
    pipeline = make(model, torch.optim.SGD(model.parameters(), lr=0.5), torch.device("cpu"))
    source, outputs = iter(batches(3)), []
    while True:
        try:
            outputs.append(pipeline.progress(source))
        except StopIteration:
            break
    again = attempt(lambda: pipeline.progress(source))
    return [outputs, again, model.layer.weight]


@case("8/the progress")
def progress(rec: Package) -> Any:
    return [driven(rec, "TrainPipelineBase"), driven(rec, "TrainPipelineBase", train=False)]


@case("8/TrainPipelineBase")
def base(rec: Package) -> Any:
    model = fill(Task())
    make = rec("distributed").TrainPipelineBase
    pipeline = make(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), None, False)
    return [pipeline.progress(iter(batches(1))), model.layer.weight]


class Tables(nn.Module):
    """(loss, output) of a KeyedJaggedTensor, over a collection and a layer."""

    def __init__(self, rec: Package) -> None:
        super().__init__()
        self.ebc = rec.EmbeddingBagCollection(tables=tables(rec), device=torch.device("cpu"))
        self.layer = nn.Linear(12, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(self.ebc(batch).values())
        return out.square().mean(dim=0), out.detach()


def ids(rec: Package, count: int, first: int = 0) -> list[Any]:
    lengths = torch.tensor([2, 0, 1, 1, 1, 1])
    return [
        rec.KeyedJaggedTensor(["a", "b"], (torch.arange(6) * 2 + step) % 5, lengths=lengths)
        for step in range(first, first + count)
    ]


def looped(pipeline: Any, source: Any) -> list[Any]:
    """Outputs of one iterator."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(source))
        except StopIteration:
            return outputs


def sharded(rec: Package, kind: str, *settings: Any, train: bool = True, sources: Any = (3, 2), **more: Any) -> Any:
    """Outputs of one iterator after the other, and weights at the end."""
    with one_rank():
        torch.manual_seed(0)
        model = Tables(rec)
        fill(model)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        rec.optim.apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.3})
        by, types = rec("distributed.sharding_plan"), rec("distributed.types")
        cut = {"t": by.table_wise(0), "u": by.table_wise(0)}
        plan = types.ShardingPlan({"ebc": by.construct_module_sharding_plan(model.ebc, cut, None, 1, 1, "cpu")})
        parallel = rec("distributed").DistributedModelParallel(model, None, torch.device("cpu"), plan).train(train)
        parallel.load_state_dict({**parallel.state_dict(), **weights})
        dense = [value for name, value in parallel.named_parameters() if name.startswith("layer")]
        optimizer = torch.optim.SGD(dense, lr=0.3)
        home = rec("distributed.train_pipeline")
        make = getattr(home, kind, None) or getattr(rec("distributed.train_pipeline.train_pipelines"), kind)
        pipeline = make(parallel, optimizer, torch.device("cpu"), *settings, **more)
        outputs, first = [], 0
        for count in sources:
            outputs.append(looped(pipeline, iter(ids(rec, count, first))))
            first += count
        layer = parallel.module.layer.weight
        return [outputs, layer, isinstance(pipeline, home.TrainPipeline)]


@case("8/TrainPipelineSparseDist")
def sparse_dist(rec: Package) -> Any:
    return [
        sharded(rec, "TrainPipelineSparseDist"),
        sharded(rec, "TrainPipelineSparseDist", train=False),
        sharded(rec, "TrainPipelineSparseDist", sources=(1, 0, 4)),
    ]


@case("8/TrainPipelineSparseDist")
def sparse_dist_keeps_batches_back(rec: Package) -> Any:
    return sharded(rec, "TrainPipelineSparseDist", False, sources=(4, 3))


@case("8/TrainPipelineSparseDist")
def sparse_dist_takes_another_iterator(rec: Package) -> Any:
    with one_rank():
        model = Tables(rec)
        parallel = rec("distributed").DistributedModelParallel(model, device=torch.device("cpu")).eval()
        pipeline = rec("distributed").TrainPipelineSparseDist(
            parallel, torch.optim.SGD(parallel.parameters(), lr=0.0), torch.device("cpu")
        )
        first, second = iter(ids(rec, 6)), iter(ids(rec, 4, 6))
        pipeline.progress(first)
        count = 0
        for out in looped(pipeline, second):
            count += out.shape == (3, 1)
        return count >= 4


@case("8/TrainPipeline")
def base_of_pipelines(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")

    class Counting(home.TrainPipeline):  # type: ignore[misc, name-defined]
        def progress(self, source: Any) -> Any:
            return next(source) + 1

    names = "TrainPipelineBase TrainPipelineSparseDist EvalPipelineSparseDist PrefetchTrainPipelineSparseDist"
    return [
        Counting().progress(iter([1])),
        [issubclass(getattr(home, name), home.TrainPipeline) for name in names.split()],
        [callable(getattr(home.TrainPipeline, name)) for name in ("progress", "reset", "sync_embeddings")],
    ]


@case("8/TrainPipelineBase")
def base_wants_a_reset(rec: Package) -> Any:
    model = fill(Task())
    home = rec("distributed.train_pipeline")
    make, given = home.TrainPipelineBase, torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = make(model, given, torch.device("cpu"))
    first = looped(pipeline, iter(batches(2)))
    again = looped(pipeline, iter(batches(2)))
    pipeline.reset()
    return [first, again, looped(pipeline, iter(batches(1))), model.layer.weight]


@case("8/TrainPipelineBase", "custom_model_fwd is called; TorchRec's base pipeline ignores it")
def base_with_a_forward(rec: Package) -> Any:
    model = fill(Task())
    make = rec("distributed").TrainPipelineBase
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = make(model, optimizer, torch.device("cpu"), lambda batch: (model(batch)[0] * 2, 5))
    return looped(pipeline, iter(batches(2)))


@case("8/EvalPipelineSparseDist")
def evaluation(rec: Package) -> Any:
    return sharded(rec, "EvalPipelineSparseDist", train=False, sources=(3, 2))


@case("8/PrefetchTrainPipelineSparseDist")
def prefetching(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")
    return issubclass(home.PrefetchTrainPipelineSparseDist, home.TrainPipelineSparseDist)


@case("8/TrainPipelineFusedSparseDist")
def lite(rec: Package) -> Any:
    return sharded(rec, "TrainPipelineSparseDistLite", sources=(3,))


@case("8/TrainPipelineFusedSparseDist")
def compiled_pipeline(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")
    seen: list[str] = []
    config = home.TorchCompileConfig(backend="eager", compile_on_iter=1)
    model = fill(Task())
    pipeline = home.TrainPipelinePT2(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.device("cpu"),
        config,
        lambda module: seen.append("before"),
        lambda module: seen.append("after"),
        lambda batch: batch * 2,
    )
    return [looped(pipeline, iter(batches(3))), seen, model.layer.weight, home.TorchCompileConfig().compile_on_iter]


@case("8/TrainPipelineFusedSparseDist")
def other_pipelines(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")
    late = rec("distributed.train_pipeline.train_pipelines").TrainPipelineSemiSync
    kinds = (late, home.TrainPipelineFusedSparseDist, home.TrainPipelineSparseDistCompAutograd)
    return [issubclass(kind, home.TrainPipelineSparseDist) for kind in kinds]


@case("8/StagedTrainPipeline")
def loading_thread(rec: Package) -> Any:
    thread = rec("distributed").DataLoadingThread(torch.device("cpu"), iter(batches(2)), False)
    thread.start()
    out = [thread.get_next_batch(), thread.get_next_batch(none_throws=True), thread.get_next_batch()]
    return [out, thread.daemon]


@case("8/StagedTrainPipeline")
def staged(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")
    stage = rec("distributed.train_pipeline.pipeline_stage").PipelineStage
    seen: list[str] = []
    stream = type("Stream", (), {"device": torch.device("cpu")})()

    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

        def record_stream(self, stream: Any) -> None:
            pass

    def named(name: str, factor: int) -> Any:
        def run(batch: Any) -> Any:
            seen.append(f"{name}{batch.value}")
            return Number(batch.value * factor)

        return stage(name, run, stream, lambda: seen.append(f"filled {name}"), lambda: seen.append("end"))

    stages = [named("a", 2), named("b", 10), named("c", 1)]
    pipeline = home.StagedTrainPipeline(stages, False, stream, lambda: seen.append("flushed"))
    out: list[Any] = []
    source = iter([Number(value) for value in range(1, 8)])
    for step in range(11):
        if step == 2:
            pipeline.set_flush(True)
        batch = pipeline.progress(source)
        out.append(batch and batch.value)
    return [out, seen, pipeline.num_stages]


@case("8/GradientAccumulationWrapper")
def accumulated(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")
    out = []
    for settings, last in (
        ({"num_steps": 2}, None),
        ({"num_steps": 3, "num_warmup_steps": 2}, None),
        ({}, None),
        ({"num_steps": 4}, 2),
    ):
        model = fill(Task())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        pipeline = home.TrainPipelineBase(model, optimizer, torch.device("cpu"))
        config = home.GradientAccumulationConfig(**settings)
        wrapped = home.GradientAccumulationWrapper(pipeline, optimizer, model, config)
        source, outputs = iter(batches(5)), []
        for step in range(5):
            outputs.append(wrapped.progress(source, is_last_batch=step == last if last else None))
            outputs.append(model.layer.weight.detach().clone())
        ended = attempt(lambda: wrapped.progress(source))  # noqa: B023
        out.append([outputs, ended, model.layer.weight, wrapped.current_step, config.is_enabled])
    return [out, attempt(lambda: home.GradientAccumulationConfig(num_steps=0) and None)]
