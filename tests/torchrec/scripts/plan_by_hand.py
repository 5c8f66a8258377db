"""A plan by hand, one way of cutting for each table, and codecs that change nothing."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.torchrec.scripts.given import draws, fill

RANKS = 2


def train(steps: int) -> list[float]:
    features = {"a": 20, "b": 30, "c": 10}
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in features.items()
    ]
    ebc = fill(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")))
    apply_optimizer_in_backward(torch.optim.SGD, list(ebc.parameters())[:2], {"lr": 0.2})
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP32, CommType.FP32), device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    plan = construct_module_sharding_plan(
        ebc,
        per_param_sharding={"t_a": table_wise(rank=0), "t_b": column_wise(ranks=[0, 1]), "t_c": data_parallel()},
        sharder=sharder,
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    model = nn.ModuleDict({"ebc": ebc})
    weights = copy.deepcopy(model.state_dict())
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
    )
    model.load_state_dict(weights)
    losses = []
    for _, ids, lengths, labels in draws(features, 8, steps, rank=dist.get_rank()):
        pooled = model.module["ebc"](KeyedJaggedTensor(list(features), ids, lengths=lengths))
        logits = pooled.wait().values().sum(dim=1) if hasattr(pooled, "wait") else pooled.values().sum(dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        losses.append(float(loss))
    return losses
