"""Cases of names that programs take from TorchRec's modules besides its main classes."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import bags, kjt, one_rank
from tests.torchrec.cases_modules import fill, tables
from tests.torchrec.cases_pipelines import Tables, ids
from tests.torchrec.package import Package, attempt

CASES = case = Cases()
GENERIC = (
    "TrainPipeline TrainPipelineBase TrainPipelineSparseDist TrainPipelineFusedSparseDist StagedTrainPipeline "
    "PrefetchTrainPipelineSparseDist EvalPipelineSparseDist"
)


@case("8/TrainPipelineContext")
def generic_pipelines(rec: Package) -> Any:
    home, found = rec("distributed.train_pipeline"), []
    for name in GENERIC.split():
        kind = getattr(home, name)
        found.append([name, str(kind[int, str]).rpartition(".")[2], len(kind.__parameters__)])
    one = [home.SparseDataDistUtil, home.DataLoadingThread]
    return [found, [len(kind.__parameters__) for kind in one]]


@case("8/TrainPipelineContext")
def a_pipeline_of_ones_own(rec: Package) -> Any:
    home = rec("distributed.train_pipeline")

    class Counting(home.TrainPipelineSparseDist[Any, torch.Tensor]):  # type: ignore[name-defined, misc]
        steps_made = 0

        def progress(self, dataloader_iter: Any) -> Any:
            self.steps_made += 1
            return super().progress(dataloader_iter)

    with one_rank():
        model = rec("distributed").DistributedModelParallel(Tables(rec), device=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.module.layer.parameters(), lr=0.1)
        pipeline = Counting(model, optimizer, torch.device("cpu"), context_type=home.TrainPipelineContext)
        for _ in range(2):
            pipeline.progress(source := iter(ids(rec, 3)))
        return [pipeline.steps_made, pipeline._device, pipeline._model is model, source is not None]


@case("2/EmbeddingBagCollection")
def configs_by_their_attributes(rec: Package) -> Any:
    bag = rec.EmbeddingBagCollection(tables=tables(rec))
    sequence = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"))
    return [[one.name for one in configs] for configs in (bag._embedding_bag_configs, sequence._embedding_configs)]


@case("2/EmbeddingBagCollection")
def lookups_on_meta(rec: Package) -> Any:
    meta, found = torch.device("meta"), []
    for weighted in (False, True):
        bag = rec.EmbeddingBagCollection(tables=tables(rec), is_weighted=weighted, device=meta)
        out = bag(kjt(rec, weighted).to(meta)) if weighted else bag(kjt(rec).to(meta))
        found.append([out.keys(), list(out.values().shape), out.values().device, out.length_per_key()])
    sequence = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"), device=meta)
    out = sequence(kjt(rec).to(meta))
    return [found, {name: [list(one.values().shape), one.values().device] for name, one in out.items()}]


def planned(rec: Package, constraints: dict[str, Any]) -> Any:
    """The plan of two tables with an optimizer in backward, and who trains which."""
    types, optim = rec("distributed.planner.types"), rec("optim.optimizers")
    model = nn.ModuleDict({"ebc": fill(bags(rec, "cpu"))})
    rec("optim.apply_optimizer_in_backward").apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.5}
    )
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    planner = rec("distributed.planner").EmbeddingShardingPlanner(
        topology=rec("distributed.planner").Topology(world_size=1, compute_device="cpu"),
        constraints={name: types.ParameterConstraints(**settings) for name, settings in constraints.items()},
    )
    plan = planner.collective_plan(
        model, rec("distributed.model_parallel").get_default_sharders(), dist.GroupMember.WORLD
    )
    parallel = rec("distributed").DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    parallel.load_state_dict(weights)
    left = dict(optim.in_backward_optimizer_filter(parallel.named_parameters()))
    keyed, every = rec("optim.keyed"), [parallel.fused_optimizer]
    if left:
        every.append(keyed.KeyedOptimizerWrapper(left, lambda params: torch.optim.SGD(params, lr=0.25)))
    optimizer, outputs = keyed.CombinedOptimizer(every), []
    for _ in range(3):
        optimizer.zero_grad()
        out = parallel.module["ebc"](kjt(rec)).values()
        out.square().mean().backward()
        optimizer.step()
        outputs.append(out)
    kinds = {name: [one.sharding_type, one.compute_kernel] for name, one in plan.plan["ebc"].items()}
    return [kinds, sorted(left), sorted(parallel.fused_optimizer.params), outputs]


@case("7/ParameterConstraints")
def data_parallel_tables_and_an_optimizer_in_backward(rec: Package) -> Any:
    whole, cut = ["data_parallel"], ["table_wise"]
    with one_rank():
        return [
            planned(rec, {name: {"sharding_types": whole} for name in "tu"}),
            planned(rec, {name: {"sharding_types": whole, "compute_kernels": ["dense"]} for name in "tu"}),
            planned(rec, {"t": {"sharding_types": whole}, "u": {"sharding_types": cut}}),
            planned(rec, {"t": {"compute_kernels": ["dense"]}, "u": {"compute_kernels": ["fused"]}}),
        ]


@case("7/ParameterConstraints")
def rounding_and_outputs_of_a_table(rec: Package) -> Any:
    settings = {"sharding_types": ["table_wise"], "output_dtype": rec("types").DataType.FP32}
    with one_rank():
        return planned(rec, {"t": {**settings, "stochastic_rounding": False}, "u": {"sharding_types": ["table_wise"]}})


@case("11/test_utils")
def seeds(rec: Package) -> Any:
    printed = io.StringIO()

    @rec("test_utils").seed_and_log
    def draw(*args: int, **kwargs: int) -> Any:
        return args, kwargs, random.random(), float(np.random.rand()), torch.rand(())

    with contextlib.redirect_stdout(printed):
        args, kwargs, *_ = draw(1, x=2)
    return [list(args), kwargs, printed.getvalue().startswith("Using random seed: ")]


@case("11/test_utils")
def ports_and_states(rec: Package) -> Any:
    home = rec("test_utils")
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    other.load_state_dict(one.state_dict())
    same = attempt(lambda: home.assert_state_buffers_parameters_equal(one, other))
    differ = attempt(lambda: home.assert_state_buffers_parameters_equal(one, nn.Linear(2, 1, bias=False)))
    port = home.get_free_port()
    kinds = sorted(home.get_state_buffers_parameters(one))
    return [0 < port < 65536, same, differ, kinds, home.skip_if_asan(lambda: 3)()]


@case("11/test_utils", "states with different values are not equal; TorchRec compares only names")
def states_of_other_values(rec: Package) -> Any:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    other.load_state_dict({name: value + 1 for name, value in one.state_dict().items()})
    return attempt(lambda: rec("test_utils").assert_state_buffers_parameters_equal(one, other))


@case("11/global_settings")
def a_flag(rec: Package) -> Any:
    home = rec("distributed.global_settings")
    before = home.get_propogate_device()
    home.set_propogate_device(True)
    found = [before, home.get_propogate_device()]
    home.set_propogate_device(before)
    return found
