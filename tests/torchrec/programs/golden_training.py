"""The golden training of DLRM: one table is cut, one is data-parallel with a dense optimizer."""

import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

SIZES = {"large": 300, "small": 12}


class Clicks(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        numbers = torch.Generator().manual_seed(3)
        for _ in range(20):
            lengths = torch.randint(0, 4, (len(SIZES), 16), generator=numbers)
            ids = [
                torch.randint(rows, (int(count),), generator=numbers)
                for rows, count in zip(SIZES.values(), lengths.sum(1), strict=True)
            ]
            sparse = KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=lengths.flatten())
            yield Batch(torch.rand(16, 5, generator=numbers), sparse, torch.randint(2, (16,), generator=numbers))


def main() -> list[float]:
    device, losses = torch.device("cpu"), []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        tables = [
            EmbeddingBagConfig(name=f"{name}_table", embedding_dim=8, num_embeddings=rows, feature_names=[name])
            for name, rows in SIZES.items()
        ]
        collection = EmbeddingBagCollection(tables=tables, device=device)
        train_model = DLRMTrain(DLRM(collection, 5, [12, 8], [12, 1], dense_device=device))
        with torch.no_grad():
            for place, (_, weight) in enumerate(sorted(train_model.named_parameters())):
                weight.copy_(torch.cos(torch.arange(weight.numel()) * 0.3 + place).view(weight.shape) / 3)
        weights = {name: value.detach().clone() for name, value in train_model.state_dict().items()}
        apply_optimizer_in_backward(
            RowWiseAdagrad, train_model.model.sparse_arch.parameters(), {"lr": 0.1, "eps": 1e-8}
        )
        constraints = {
            "large_table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]),
            "small_table": ParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value],
                compute_kernels=[EmbeddingComputeKernel.DENSE.value],
            ),
        }
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device=device.type), constraints=constraints
        )
        plan = planner.collective_plan(train_model, get_default_sharders(), dist.GroupMember.WORLD)
        model = DistributedModelParallel(module=train_model, device=device, plan=plan)
        model.load_state_dict(weights)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=0.05),
        )
        optimizer = CombinedOptimizer([model.fused_optimizer, dense])
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
        batches = iter(Clicks())
        while True:
            try:
                losses.append(float(pipeline.progress(batches)[0]))
            except StopIteration:
                break
        losses += [float(value.double().sum()) for value in dense.params.values()][:3]
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
