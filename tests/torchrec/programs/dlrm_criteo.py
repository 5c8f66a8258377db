"""DLRM on Criteo's binary files: training pipeline, validation by an area under the curve, a schedule."""

import os
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    INT_FEATURE_COUNT,
    InMemoryBinaryCriteoIterDataPipe,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

ROWS, BATCH, DIM = 200, 16, 8
SIZES = [20 + 3 * place for place in range(CAT_FEATURE_COUNT)]


def write_files(folder: str, name: str, seed: int) -> tuple[str, str, str]:
    numbers = np.random.RandomState(seed)
    dense = np.log(numbers.randint(1, 50, (ROWS, INT_FEATURE_COUNT))).astype(np.float32)
    sparse = numbers.randint(0, 10_000, (ROWS, CAT_FEATURE_COUNT)).astype(np.int32)
    labels = (sparse[:, :1] % 20 < 8).astype(np.int32)
    paths = tuple(os.path.join(folder, f"{name}_{kind}.npy") for kind in ("dense", "sparse", "labels"))
    for path, array in zip(paths, (dense, sparse, labels), strict=True):
        np.save(path, array)
    return paths  # type: ignore[return-value]


def loader(stage: str, files: list[tuple[str, str, str]]) -> DataLoader[Batch]:
    dense, sparse, labels = (list(paths) for paths in zip(*files, strict=True))
    pipe = InMemoryBinaryCriteoIterDataPipe(
        stage,
        dense,
        sparse,
        labels,
        batch_size=BATCH,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        shuffle_batches=stage == "train",
        hashes=SIZES,
    )
    return DataLoader(pipe, batch_size=None, collate_fn=lambda batch: batch)


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(model.named_parameters())):
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.37 + place).view(weight.shape) / 4)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    return float((positive[:, None] > negative[None]).double().mean())


def main() -> list[float]:
    device, losses = torch.device("cpu"), []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        days = [write_files(folder, f"day_{day}", day) for day in range(3)]
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
            for name, rows in zip(DEFAULT_CAT_NAMES, SIZES, strict=True)
        ]
        dlrm = DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=device),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[16, DIM],
            over_arch_layer_sizes=[16, 8, 1],
            dense_device=device,
        )
        train_model = DLRMTrain(dlrm)
        fill(train_model)
        apply_optimizer_in_backward(
            torch.optim.Adagrad, train_model.model.sparse_arch.parameters(), {"lr": 0.1, "eps": 1e-8}
        )
        weights = {name: value.detach().clone() for name, value in train_model.state_dict().items()}
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=device.type
            ),
            batch_size=BATCH,
            storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        )
        plan = planner.collective_plan(train_model, get_default_sharders(), dist.GroupMember.WORLD)
        model = DistributedModelParallel(module=train_model, device=device, plan=plan)
        model.load_state_dict(weights)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-8),
        )
        stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=5, value=0.2)]
        optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer, dense]), stages, lr=0.1)
        train: TrainPipelineSparseDist[Batch, Any] = TrainPipelineSparseDist(model, optimizer, device)
        evaluate: EvalPipelineSparseDist[Batch, Any] = EvalPipelineSparseDist(model, optimizer, device)
        for _ in range(2):
            model.train()
            batches = iter(loader("train", days[:2]))
            while True:
                try:
                    losses.append(float(train.progress(batches)[0]))
                except StopIteration:
                    break
            model.eval()
            batches, scores, labels = iter(loader("val", days[2:])), [], []
            while True:
                try:
                    _, logits, label = evaluate.progress(batches)
                except StopIteration:
                    break
                scores.append(logits.sigmoid())
                labels.append(label)
            losses.append(auc(torch.cat(scores), torch.cat(labels)))
            evaluate.reset()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
