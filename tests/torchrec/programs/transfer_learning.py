"""Transfer learning: vectors that another model learned are written into the shards of tables on two ranks."""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

WORLD, USERS, ITEMS, DIM, BATCH = 2, 21, 30, 8, 8


class Towers(torch.nn.Module):
    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = collection
        self.out = torch.nn.Linear(2 * DIM, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.out(self.ebc(kjt).values()).squeeze(1)


def pretrained() -> dict[str, torch.Tensor]:
    return {
        "user": torch.sin(torch.arange(USERS * DIM) * 0.7).view(USERS, DIM),
        "item": torch.cos(torch.arange(ITEMS * DIM) * 0.3).view(ITEMS, DIM),
    }


def write(model: torch.nn.Module) -> None:
    """Every shard gets its rows and columns."""
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor):
            continue
        whole = pretrained()[name.split(".")[-2]]
        assert list(value.size()) == list(whole.shape)
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    device, losses = torch.device("cpu"), []
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in (("user", USERS), ("item", ITEMS))
    ]
    module = Towers(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    with torch.no_grad():
        module.out.weight.copy_(torch.linspace(-1, 1, 2 * DIM)[None])
        module.out.bias.zero_()
    apply_optimizer_in_backward(RowWiseAdagrad, module.ebc.parameters(), {"lr": 0.05, "eps": 1e-8})
    sharder = EmbeddingBagCollectionSharder()
    cuts = {"user": row_wise(), "item": table_wise(rank=1)}
    plan = construct_module_sharding_plan(module.ebc, cuts, sharder, WORLD, WORLD, "cpu")
    model = DistributedModelParallel(module, device=device, plan=ShardingPlan({"ebc": plan}), sharders=[sharder])
    write(model)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    for step in range(10):
        numbers = torch.Generator().manual_seed(50 * step + rank)
        ids = [torch.randint(rows, (BATCH,), generator=numbers) for rows in (USERS, ITEMS)]
        kjt = KeyedJaggedTensor.from_lengths_sync(["user", "item"], torch.cat(ids), torch.ones(2 * BATCH).int())
        dense.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(kjt), (ids[0] % 2).float())
        loss.backward()
        dense.step()
        losses.append(float(loss))
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD, start_method="fork")
        return [loss for rank in range(WORLD) for loss in json.loads(Path(folder, f"{rank}.json").read_text())]


if __name__ == "__main__":
    print(main())
