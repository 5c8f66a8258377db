"""A generative recommender (HSTU) on two ranks: jagged attention over sharded sequences guesses the next item."""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

WORLD, ITEMS, ACTIONS, DIM, HEADS, LENGTH, BATCH = 2, 25, 6, 8, 2, 7, 6


class STULayer(nn.Module):
    """Pointwise attention: gated, without softmax, over rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.uvqk, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        u, v, q, k = nn.functional.silu(self.uvqk(self.norm(x))).split(DIM, dim=1)
        q, k, v = (
            torch.ops.fbgemm.jagged_to_padded_dense(one, [offsets], [LENGTH], 0.0).unflatten(-1, (HEADS, -1))
            for one in (q, k, v)
        )
        scores = nn.functional.silu(torch.einsum("bnhd,bmhd->bhnm", q, k)) / LENGTH
        causal = torch.ones(LENGTH, LENGTH).tril()
        mixed = torch.einsum("bhnm,bmhd->bnhd", scores * causal, v).flatten(2)
        (rows,) = torch.ops.fbgemm.dense_to_jagged(mixed, [offsets])[:1]
        return x + self.out(rows * u)


class HSTU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=f"{name}_table",
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[name],
                data_type=DataType.FP32,
            )
            for name, rows in (("item_id", ITEMS), ("action", ACTIONS))
        ]
        self._embedding_collection = EmbeddingCollection(tables=tables, need_indices=False, device=torch.device("meta"))
        self.layers = nn.ModuleList(STULayer() for _ in range(2))
        self.head = nn.Linear(DIM, ITEMS)

    def forward(self, uih: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors: dict[str, JaggedTensor] = self._embedding_collection(uih)
        x = vectors["item_id"].values() + vectors["action"].values()
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(vectors["item_id"].lengths())
        for layer in self.layers:
            x = layer(x, offsets)
        return self.head(x), offsets


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Items that walk in steps of an action, and the items that come next."""
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    lengths = torch.randint(2, LENGTH + 1, (BATCH,), generator=numbers)
    actions = torch.randint(1, ACTIONS, (BATCH, 1), generator=numbers).expand(BATCH, LENGTH + 1)
    items = (torch.randint(ITEMS, (BATCH, 1), generator=numbers) + actions.cumsum(1)) % ITEMS
    inside = torch.arange(LENGTH)[None] < lengths[:, None]
    ids = torch.cat([items[:, :-1][inside], actions[:, :-1][inside]])
    kjt = KeyedJaggedTensor.from_lengths_sync(["item_id", "action"], ids, lengths.repeat(2).int())
    return kjt, items[:, 1:][inside]


def sharded(device: torch.device) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = HSTU()
    apply_optimizer_in_backward(RowWiseAdagrad, model._embedding_collection.parameters(), {"lr": 0.1, "eps": 1e-8})
    with torch.no_grad():
        for place, weight in enumerate([*model.layers.parameters(), *model.head.parameters()]):
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.61 + place).view(weight.shape) / 3)
    sharder, group = EmbeddingCollectionSharder(), dist.GroupMember.WORLD
    constraints = {
        "item_id_table": ParameterConstraints(sharding_types=[ShardingType.COLUMN_WISE.value], min_partition=4)
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD, local_world_size=WORLD, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], group)
    env = ShardingEnv.from_process_group(group)
    parallel = DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=[sharder])
    with torch.no_grad():
        for name, value in sorted(parallel.state_dict().items()):
            for shard in value.local_shards() if "_table" in name else ():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole = torch.cos(torch.arange(value.size(0) * DIM) * 0.17).view(-1, DIM) / 2
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    named = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(named, lambda params: torch.optim.Adam(params, lr=0.02))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model, optimizer = sharded(torch.device("cpu"))
    losses = []
    for step in range(12):
        kjt, following = batch(rank, step)
        optimizer.zero_grad()
        logits, _ = model(kjt)
        loss = nn.functional.cross_entropy(logits, following)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD, start_method="fork")
        return [loss for rank in range(WORLD) for loss in json.loads(Path(folder, f"{rank}.json").read_text())]


if __name__ == "__main__":
    print(main())
