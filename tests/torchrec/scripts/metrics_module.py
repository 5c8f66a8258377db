"""A metric module beside the training: figures of the run and of a window, over all ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    ThroughputDef,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.torchrec.scripts.given import draws, fill

RANKS = 2
BATCH = 12
FEATURES = {"a": 20, "b": 30}
TASKS = [RecTaskInfo(), RecTaskInfo("Unlikely", "label", "opposite", "weight")]


def make_metrics() -> RecMetricModule:
    named = [RecMetricEnum.NE, RecMetricEnum.AUC, RecMetricEnum.CALIBRATION, RecMetricEnum.CTR, RecMetricEnum.MSE]
    config = MetricsConfig(
        rec_tasks=TASKS,
        rec_metrics={kind: RecMetricDef(rec_tasks=TASKS, window_size=100) for kind in named},
        throughput_metric=ThroughputDef(),
        compute_interval_steps=5,
    )
    return generate_metric_module(
        RecMetricModule,
        metrics_config=config,
        batch_size=BATCH,
        world_size=RANKS,
        my_rank=dist.get_rank(),
        state_metrics_mapping={},
        device=torch.device("cpu"),
    )


def train(steps: int) -> list[float]:
    """Each step's loss, and to it the sum of all figures whenever there are new ones."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in FEATURES.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    model = fill(nn.ModuleDict({"ebc": ebc, "over": nn.Linear(19, 1)}))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder()
    cuts = {"t_a": table_wise(rank=1), "t_b": table_wise(rank=0)}
    plan = construct_module_sharding_plan(ebc, cuts, sharder, RANKS, RANKS, "cpu")
    weights = copy.deepcopy(model.state_dict())
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
    )
    model.load_state_dict(weights)
    metrics = make_metrics()
    losses = []
    over = model.module["over"]
    optimizer = torch.optim.SGD(over.parameters(), lr=0.1)
    for numbers, ids, lengths, labels in draws(FEATURES, BATCH, steps, 3, rank=dist.get_rank()):
        optimizer.zero_grad()
        pooled = model.module["ebc"](KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)).wait()
        logits = over(torch.cat((pooled["a"], pooled["b"], numbers), dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        scores = torch.sigmoid(logits.detach())
        weight = 1.0 + labels.float()
        metrics.update({"label": labels.float(), "prediction": scores, "opposite": 1 - scores, "weight": weight})
        losses.append(float(loss))
        if metrics.should_compute():
            figures = metrics.compute()
            losses[-1] += sum(float(value) for key, value in figures.items() if "throughput" not in key)
    return losses
