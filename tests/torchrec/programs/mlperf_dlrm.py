"""MLPerf's form of DLRM on two ranks: multi-hot ids, low-rank crosses (DCN), Adagrad, a polynomial schedule."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchmetrics
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

ROWS, HOTS, DIM, BATCH, DENSE = (40, 100, 30), (3, 1, 4), 8, 12, 5
NAMES = [f"cat_{place}" for place in range(len(ROWS))]
WORLD = 2


class PolynomialDecay(torch.optim.lr_scheduler.LRScheduler):
    """Warms up for three steps, then decays with the square."""

    def get_lr(self) -> list[float]:
        step = self._step_count
        factor = step / 3 if step < 3 else (1 - min(step - 3, 10) / 20) ** 2
        return [base * factor for base in self.base_lrs]


def clicks(rank: int, steps: range) -> Iterator[Batch]:
    for step in steps:
        numbers = torch.Generator().manual_seed(100 * step + rank)
        ids = [torch.randint(rows, (BATCH * hot,), generator=numbers) for rows, hot in zip(ROWS, HOTS, strict=True)]
        lengths = torch.tensor(HOTS, dtype=torch.int32).repeat_interleave(BATCH)
        sparse = KeyedJaggedTensor(keys=NAMES, values=torch.cat(ids), lengths=lengths, stride=BATCH)
        labels = (ids[1] % 3 == 0).int()
        yield Batch(torch.rand(BATCH, DENSE, generator=numbers), sparse, labels)


def plan_of(model: torch.nn.Module) -> object:
    kinds = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_WISE)
    constraints = {
        f"t_{name}": ParameterConstraints(sharding_types=[kind.value]) for name, kind in zip(NAMES, kinds, strict=True)
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device="cpu"),
        batch_size=BATCH,
        constraints=constraints,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    return planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)


def write(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Every shard gets its rows and columns, every other tensor its numbers."""
    for name, value in model.state_dict().items():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weights[name][row : row + rows, column : column + columns])
        if not isinstance(value, ShardedTensor):
            value.copy_(weights[name])


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(NAMES, ROWS, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=device)
    dlrm = DLRM_DCN(collection, DENSE, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4, dense_device=device)
    train_model = DLRMTrain(dlrm)
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(train_model.named_parameters())):
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.29 + place).view(weight.shape) / 4)
    weights = {name: value.detach().clone() for name, value in train_model.state_dict().items()}
    adagrad = {"lr": 0.1, "eps": 1e-8}
    apply_optimizer_in_backward(torch.optim.Adagrad, train_model.model.sparse_arch.parameters(), dict(adagrad))
    model = DistributedModelParallel(module=train_model, device=device, plan=plan_of(train_model))
    write(model, weights)
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(named, lambda params: torch.optim.Adagrad(params, **adagrad))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = PolynomialDecay(optimizer)
    pipeline, batches, losses = TrainPipelineSparseDist(model, optimizer, device), clicks(rank, range(14)), []
    while True:
        try:
            losses.append(float(pipeline.progress(batches)[0]))
            schedule.step()
        except StopIteration:
            break
    model.eval()
    auroc = torchmetrics.AUROC(task="binary")
    evaluation, batches = EvalPipelineSparseDist(model, optimizer, device), clicks(rank, range(20, 24))
    while True:
        try:
            loss, logits, labels = evaluation.progress(batches)
        except StopIteration:
            break
        losses.append(float(loss))
        auroc.update(logits, labels)
    losses.append(float(auroc.compute()))
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD, start_method="fork")
        return [loss for rank in range(WORLD) for loss in json.loads(Path(folder, f"{rank}.json").read_text())]


if __name__ == "__main__":
    print(main())
