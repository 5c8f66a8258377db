"""Sharding: one collection under one sharding type after the other, on two ranks, and what it pools and learns."""

import json
import os
import tempfile
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

WORLD, LARGE, SMALL = 2, 64, 16
KINDS = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL)


def tables() -> list[torchrec.EmbeddingBagConfig]:
    large = [
        torchrec.EmbeddingBagConfig(
            name=f"large_table_{place}",
            embedding_dim=8,
            num_embeddings=LARGE,
            feature_names=[f"large_feature_{place}"],
            pooling=torchrec.PoolingType.SUM,
        )
        for place in range(2)
    ]
    small = torchrec.EmbeddingBagConfig(
        name="small_table",
        embedding_dim=8,
        num_embeddings=SMALL,
        feature_names=["small_feature"],
        pooling=torchrec.PoolingType.MEAN,
    )
    return [*large, small]


def gen_constraints(kind: ShardingType) -> dict[str, ParameterConstraints]:
    kernel = EmbeddingComputeKernel.DENSE if kind is ShardingType.DATA_PARALLEL else EmbeddingComputeKernel.FUSED
    return {
        table.name: ParameterConstraints(sharding_types=[kind.value], compute_kernels=[kernel.value])
        for table in tables()
    }


def ids(rank: int, step: int) -> torchrec.KeyedJaggedTensor:
    numbers = torch.Generator().manual_seed(10 * step + rank)
    features = [feature for table in tables() for feature in table.feature_names]
    lengths = torch.randint(0, 4, (len(features) * 6,), generator=numbers)
    values = torch.randint(SMALL, (int(lengths.sum()),), generator=numbers)
    return torchrec.KeyedJaggedTensor(keys=features, values=values, lengths=lengths)


def write(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Every shard gets its rows and columns, every other tensor its numbers."""
    for name, value in model.state_dict().items():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weights[name][row : row + rows, column : column + columns])
        if not isinstance(value, ShardedTensor):
            value.copy_(weights[name])


def train(kind: ShardingType, rank: int, device: torch.device) -> list[float]:
    module = torchrec.EmbeddingBagCollection(device=device, tables=tables())
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(module.named_parameters())):
            weight.copy_(torch.cos(torch.arange(weight.numel()) * 0.41 + place).view(weight.shape) / 2)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if kind is not ShardingType.DATA_PARALLEL:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.2})
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    group = dist.GroupMember.WORLD
    topology = Topology(world_size=WORLD, local_world_size=WORLD, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=gen_constraints(kind))
    plan: ShardingPlan = planner.collective_plan(module, sharders, group)
    assert {one.sharding_type for one in plan.plan[""].values()} == {kind.value}
    model = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(group), plan=plan, sharders=sharders, device=device
    )
    write(model, weights)
    dense = torch.optim.SGD(model.parameters(), lr=0.2) if kind is ShardingType.DATA_PARALLEL else None
    losses = []
    for step in range(4):
        if dense is not None:
            dense.zero_grad()
        pooled = model(ids(rank, step)).wait()
        loss = (pooled.values() - 0.5).square().mean()
        loss.backward()
        if dense is not None:
            dense.step()
        losses += [float(loss), *(float(vectors.sum()) for _, vectors in sorted(pooled.to_dict().items()))]
    return losses


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    losses = [loss for kind in KINDS for loss in train(kind, rank, torch.device("cpu"))]
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD, start_method="fork")
        return [loss for rank in range(WORLD) for loss in json.loads(Path(folder, f"{rank}.json").read_text())]


if __name__ == "__main__":
    print(main())
