"""Warmup around the tables' optimizer, clipping and warmup around the dense one, both combined; resumed half-way."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.torchrec.scripts.given import draws, fill

FEATURES = {"a": 20, "b": 30}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
            for name, rows in FEATURES.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Linear(16, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(kjt).values()).squeeze(1)


def train(steps: int) -> list[float]:
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
    whole = fill(Net())
    weights = copy.deepcopy(whole.state_dict())
    constraints = {
        name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for name in [f"t_{each}" for each in FEATURES]
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), batch_size=16, constraints=constraints
    )
    plan = planner.collective_plan(whole, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(whole, device=torch.device("cpu"), sharders=[sharder], plan=plan)
    model.load_state_dict(weights)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    stages = [WarmupStage(WarmupPolicy.LINEAR, 5, 0.1), WarmupStage(WarmupPolicy.POLY, 30, 1.0, decay_iters=40)]
    optimizer = CombinedOptimizer(
        [
            ("fused", WarmupOptimizer(model.fused_optimizer, stages, 0.4)),
            ("dense", GradientClippingOptimizer(WarmupOptimizer(dense, stages, 0.05), GradientClipping.NORM, 0.3)),
        ]
    )
    losses = []
    for step, (_, ids, lengths, labels) in enumerate(draws(FEATURES, 8, steps)):
        optimizer.zero_grad()
        logits = model(KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        if step == steps // 2:
            optimizer.load_state_dict(optimizer.state_dict())
    return losses
