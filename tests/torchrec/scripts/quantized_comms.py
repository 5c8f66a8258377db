"""Vectors and gradients that travel in fewer bits: half precision with loss scales, INT8."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.torchrec.scripts.given import draws, fill

RANKS = 2
CONFIGS = [
    QCommsConfig(CommType.FP16, CommType.FP32),
    QCommsConfig(CommType.FP16, CommType.FP16, forward_loss_scale=4.0, backward_loss_scale=1024.0),
    QCommsConfig(CommType.INT8, CommType.INT8),
]
FEATURES = {"a": 20, "b": 30}


def run(config: QCommsConfig, cuts, steps: int) -> list[float]:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in FEATURES.items()
    ]
    ebc = fill(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.2})
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    plan = construct_module_sharding_plan(ebc, cuts, sharder, RANKS, RANKS, "cpu")
    model = nn.ModuleDict({"ebc": ebc, "over": fill(nn.Linear(16, 1))})
    weights = copy.deepcopy(model.state_dict())
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
    )
    model.load_state_dict(weights)
    over = model.module["over"]
    optimizer = torch.optim.SGD(over.parameters(), lr=0.1)
    losses = []
    for _, ids, lengths, labels in draws(FEATURES, 8, steps, rank=dist.get_rank()):
        optimizer.zero_grad()
        pooled = model.module["ebc"](KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)).wait()
        logits = over(pooled.values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def train(steps: int) -> list[float]:
    """Mean over the formats of each step's loss."""
    whole = {"t_a": table_wise(rank=0), "t_b": table_wise(rank=1)}
    cut = {"t_a": table_wise(rank=1), "t_b": column_wise(ranks=[0, 1])}
    runs = [run(config, whole, steps) for config in CONFIGS] + [run(CONFIGS[0], cut, steps)]
    return [sum(of_step) / len(of_step) for of_step in zip(*runs, strict=True)]
