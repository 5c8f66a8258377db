"""Names of TorchRec beyond its main classes: what recorded answers of one process cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec import quant
from rayrec.distributed import ParameterSharding
from rayrec.torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rayrec.torchrec.datasets.criteo import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe
from rayrec.torchrec.datasets.utils import ParallelReadConcat
from rayrec.torchrec.distributed import DistributedModelParallel, sharding_plan, train_pipeline
from rayrec.torchrec.distributed.model_parallel import DMPCollection, ShardingPlan
from rayrec.torchrec.distributed.planner import ParameterConstraints
from rayrec.torchrec.distributed.planner.constraints import with_rounding
from rayrec.torchrec.distributed.test_utils.multi_process import MultiProcessContext, MultiProcessTestBase
from rayrec.torchrec.fx import symbolic_trace
from rayrec.torchrec.fx.tracer import Tracer, is_fx_tracing
from rayrec.torchrec.inference import modules, quantize_inference_model
from rayrec.torchrec.metrics.metrics_config import RecTaskInfo
from rayrec.torchrec.metrics.ne import NEMetricComputation
from rayrec.torchrec.metrics.rec_metric import RecMetricComputation
from rayrec.torchrec.not_offered import NotOffered
from rayrec.torchrec.quant import embedding_modules as quantized
from tests.ranks import on_ranks
from tests.torchrec.cases_computations import mean_of_predictions
from tests.torchrec.package import Package

CPU = torch.device("cpu")


class Model(nn.Module):
    """(loss, vectors) of a KeyedJaggedTensor."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config], device=CPU)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.ebc(batch).values()
        return vectors.square().mean().view(1), vectors.detach()


def ids(*values: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(values), lengths=torch.ones(len(values), dtype=torch.int64))


def tables_after_steps(group: dist.ProcessGroup, interval: int | None) -> list[list[float]]:
    """The table of this replica after each of three steps on ids of its own."""
    model = Model()
    with torch.no_grad():
        model.ebc.embedding_bags["t"].weight.copy_(torch.arange(40.0).view(10, 4))
    sharded = sharding_plan.construct_module_sharding_plan(
        model.ebc, {"t": sharding_plan.table_wise(0, compute_kernel="fused")}, None, 1, 1
    )
    parallel = DMPCollection(model, CPU, ShardingPlan(plan={"ebc": sharded}), 2, 1, group)
    pipeline = train_pipeline.TrainPipelineSparseDist[KeyedJaggedTensor, torch.Tensor](
        parallel,
        torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0),
        CPU,
        dmp_collection_sync_interval_batches=interval,
    )
    batches, found = iter([ids(group.rank() + 1) for _ in range(3)]), []
    for _ in range(3):
        pipeline.progress(batches)
        (table,) = parallel.tables().values()
        found.append(table.local[0].weight.flatten().tolist())
    return found


@pytest.mark.parametrize(("interval", "equal"), [(1, [True] * 3), (2, [True, False, True]), (None, [False] * 3)])
def test_a_pipeline_averages_the_groups_of_a_dmp_collection(interval: int | None, equal: list[bool]) -> None:
    first, second = on_ranks(2, tables_after_steps, interval)
    assert [one == pytest.approx(other) for one, other in zip(first, second, strict=True)] == equal


def test_arguments_that_a_pipeline_does_not_have_are_refused() -> None:
    class Context(train_pipeline.TrainPipelineContext):
        pass

    settings: Any = (Model(), torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1), CPU)
    with pytest.raises(ValueError, match="context_type=Context: custom contexts are not supported"):
        train_pipeline.TrainPipelineSparseDist(*settings, context_type=Context)
    for kind in (train_pipeline.TrainPipelineSparseDist, train_pipeline.PrefetchTrainPipelineSparseDist):
        with pytest.raises(TypeError, match="custom_model_fw"):
            kind(*settings, custom_model_fw=print)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_constraint_says_how_a_table_of_16_bits_is_rounded(rounds: bool) -> None:
    sharding = ParameterSharding("table_wise", "fused", shards=())
    plan = ShardingPlan(plan={"ebc": {"t": sharding, "u": sharding}})
    constraints = {"t": ParameterConstraints(stochastic_rounding=rounds), "u": ParameterConstraints()}
    told = with_rounding(plan, constraints).plan["ebc"]
    assert (told["t"].stochastic_rounding, told["u"].stochastic_rounding) == (rounds, None)


def rounded(group: dist.ProcessGroup, rounds: bool | None) -> list[float]:
    """An FP16 table after steps that are smaller than its numbers' distances."""
    config = EmbeddingBagConfig(
        name="t", embedding_dim=64, num_embeddings=4, feature_names=["f"], data_type=DataType.FP16
    )
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=CPU)})
    with torch.no_grad():
        model["ebc"].embedding_bags["t"].weight.fill_(1.0)
    sharded = sharding_plan.construct_module_sharding_plan(
        model["ebc"], {"t": sharding_plan.table_wise(0, compute_kernel="fused")}, None, 1, 1
    )
    plan = with_rounding(ShardingPlan(plan={"ebc": sharded}), {"t": ParameterConstraints(stochastic_rounding=rounds)})
    plan = ShardingPlan.from_json(plan.to_json())
    parallel = DistributedModelParallel(model, device=CPU, plan=plan)
    for _ in range(4):
        (parallel.module["ebc"](ids(1)).values().sum() * 0.01).backward()
    (table,) = parallel.tables().values()
    return table.local[0].weight[1].float().tolist()


@pytest.mark.filterwarnings("ignore:.*stochastic_rounding")
def test_rounding_at_random_keeps_small_updates_of_a_table() -> None:
    (nearest,), (random,) = on_ranks(1, rounded, False), on_ranks(1, rounded, True)
    assert set(nearest) == {1.0} and len(set(random)) > 1


def test_traces_leave_quantized_and_unsharded_collections_whole() -> None:
    class Asking(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch * 2 if is_fx_tracing() else batch

    model, batch = Model(), ids(1, 3)
    small = modules.quantize_embeddings(Model(), torch.qint8, inplace=True)
    for each in (model, small):
        graph = symbolic_trace(each)
        assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["ebc"]
        assert torch.equal(graph(batch)[1], each(batch)[1])
    assert torch.equal(symbolic_trace(Asking())(torch.ones(1)), torch.full((1,), 2.0)) and not is_fx_tracing()
    with pytest.raises(ValueError, match=r"trace model\.module"):
        Tracer().trace(DistributedModelParallel(model, device=CPU))


def test_what_a_quantized_collection_cannot_be_made_of_is_told() -> None:
    with pytest.raises(NotOffered, match="create a quantized EmbeddingBagCollection from a trained one"):
        quantized.EmbeddingBagCollection(tables=[], is_weighted=False, device=CPU)
    with pytest.raises(NotOffered, match=r"use rayrec\.torchrec\.inference\.shard_quant_model\(model, group\)"):
        modules.shard_quant_model(Model())
    with pytest.raises(NotOffered, match="quantization_mapping: leave it out"):
        modules.quantize_inference_model(Model(), {"Model": Model})
    with pytest.raises(ValueError, match="additional_mapping has no entry for Model"):
        modules.quantize_embeddings(Model(), torch.qint8, True, [Model])
    assert isinstance(modules.quantize_inference_model(Model()).ebc.collection, quant.EmbeddingBagCollection)


def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have equal lengths, not \(2, 1, 1\)"):
        InMemoryBinaryCriteoIterDataPipe("train", ["a", "b"], ["a"], ["a"], 1, 0, 1)
    with pytest.raises(NotOffered, match="shuffle_training_set=True"):
        BinaryCriteoUtils.shuffle("a", "b", "c", {})


def test_workers_of_a_loader_read_files_of_their_own() -> None:
    loader = torch.utils.data.DataLoader(ParallelReadConcat([1, 2], [3], [4, 5]), batch_size=None, num_workers=2)
    assert sorted(loader) == [1, 2, 3, 4, 5]


def own_metric(group: dist.ProcessGroup) -> dict[str, float]:
    metric = mean_of_predictions(Package("rayrec.torchrec"))(
        group.size(),
        group.rank(),
        2,
        [RecTaskInfo(name="x")],
        window_size=8,
        process_group=group,
        compute_on_all_ranks=True,
    )
    scores = torch.tensor([0.1, 0.2]) + 0.4 * group.rank()
    for _ in range(3):
        metric.update(predictions={"x": scores}, labels={"x": torch.ones(2)}, weights=None)
    found = {key: float(value) for key, value in metric.compute().items()}
    assert float(metric.local_compute()["average-x|local_lifetime_auc"]) == pytest.approx(0.15 + 0.4 * group.rank())
    return found


def test_states_of_a_metric_of_ones_own_are_joined_over_ranks() -> None:
    for found in on_ranks(2, own_metric):
        assert found == pytest.approx({
            "average-x|lifetime_auc": 0.35,
            "average-x|window_auc-mean": 0.35,
            "average-x|most": 0.6,
        })  # fmt: skip


def test_states_that_cannot_be_joined_are_refused() -> None:
    computation: RecMetricComputation = NEMetricComputation(0, 4, 1, 8)
    with pytest.raises(ValueError, match=r"state 'kept': default=.* must be a tensor; ranks cannot reduce lists"):
        computation._add_state("kept", [], add_window_state=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state 'kept': dist_reduce_fx='cat' must be sum, mean, max or min"):
        computation._add_state("kept", torch.zeros(1), add_window_state=False, dist_reduce_fx="cat")


def total_of_ranks(rank: int, world_size: int, more: int = 0) -> None:
    with MultiProcessContext(rank, world_size) as context:
        total = torch.tensor([rank + more])
        dist.all_reduce(total, group=context.pg)
        assert int(total) == sum(range(world_size)) + more * world_size, more


class OnProcesses(MultiProcessTestBase):
    def __init__(self, methodName: str = "runTest") -> None:
        super().__init__(methodName, mp_init_mode="fork")

    def test_it_runs_on_every_rank(self) -> None:
        self._run_multi_process_test(callable=total_of_ranks, world_size=2, more=3)

    def test_an_error_names_the_rank(self) -> None:
        with pytest.raises(RuntimeError, match=r"rank \d: Traceback[\s\S]*AssertionError"):
            self._run_multi_process_test_per_rank(
                callable=total_of_ranks, world_size=2, kwargs_per_rank=[{"more": 1}, {"more": 0}]
            )


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            [EmbeddingBagCollection([table("a", "x")]), EmbeddingBagCollection([table("b", "y")])]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([bags(features).values() for bags in self.inner], dim=1)


def table(name: str, feature: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[feature])


def test_every_collection_is_replaced_and_scores_stay_near() -> None:
    model, batch = Sums(), KeyedJaggedTensor(["x", "y"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))
    before = model(batch).detach()
    assert quantize_inference_model(model, {"b": "fp16"}, fp_weight_dtype=torch.int8) is model
    kinds = {name: kind for bags in model.inner for name, kind in bags.formats().items()}
    assert kinds == {"a": quant.TableFormat.INT8, "b": quant.TableFormat.FP16}
    torch.testing.assert_close(model(batch), before, rtol=0, atol=0.01)
    assert (model(batch) != before).any()
    assert isinstance(quantize_inference_model(EmbeddingBagCollection([table("a", "x")])), quant.EmbeddingBagCollection)
    with pytest.raises(ValueError, match="unknown table 'c'"):
        quantize_inference_model(Sums(), {"c": "int8"})
