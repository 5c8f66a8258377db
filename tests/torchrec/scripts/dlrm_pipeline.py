"""DLRM with a SparseDist pipeline: tables trained inside backward, the rest by a combined optimizer."""

import copy

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.torchrec.scripts.given import draws, fill

RANKS = 2


def train(steps: int) -> list[float]:
    features = {"cat_0": 40, "cat_1": 25, "cat_2": 60}
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in features.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    model = fill(DLRMTrain(DLRM(ebc, 4, [16, 8], [16, 1], dense_device=torch.device("cpu"))))
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    weights = copy.deepcopy(model.state_dict())
    constraints = {
        name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for name in [f"t_{each}" for each in features]
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu"), batch_size=16, constraints=constraints
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=torch.device("cpu"), plan=plan)
    model.load_state_dict(weights)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    pipeline = TrainPipelineSparseDist(
        model, CombinedOptimizer([model.fused_optimizer, dense]), torch.device("cpu"), execute_all_batches=True
    )
    batches = iter(
        [
            Batch(numbers, KeyedJaggedTensor.from_lengths_sync(list(features), ids, lengths), labels)
            for numbers, ids, lengths, labels in draws(features, 16, steps, 4, rank=dist.get_rank())
        ]
    )
    losses = []
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            return losses
        losses.append(float(loss))
