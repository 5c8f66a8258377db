"""Two towers over one collection: users and items meet in a dot product."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.torchrec.scripts.given import draws, fill

RANKS = 2


class TwoTower(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.user, self.item = MLP(8, [16, 6], activation="swish_layernorm"), MLP(8, [16, 6])

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(kjt)
        return (self.user(pooled["user"]) * self.item(pooled["item"])).sum(dim=1)


def train(steps: int) -> list[float]:
    features = {"user": 50, "item": 30}
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name], pooling=PoolingType.MEAN
        )
        for name, rows in features.items()
    ]
    model = fill(TwoTower(EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))))
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    weights = copy.deepcopy(model.state_dict())
    constraints = {
        name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for name in [f"t_{each}" for each in features]
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu"), batch_size=16, constraints=constraints
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    model.load_state_dict(weights)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    losses = []
    for _, ids, lengths, labels in draws(features, 12, steps, rank=dist.get_rank()):
        optimizer.zero_grad()
        logits = model(KeyedJaggedTensor(keys=list(features), values=ids, lengths=lengths))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
