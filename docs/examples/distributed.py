"""Sharding a model and training it; with `torchrun` the same lines run on any number of ranks."""

import torch

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingComputeKernel,
    EmbOptimType,
    ParameterSharding,
    Shard,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Span,
    TrainPipeline,
)
from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

tables = [EmbeddingBagConfig(50, 8, name, feature_names=[name]) for name in ("user", "item")]
model = DLRM(tables, num_dense=3, dense_arch=[16, 8], over_arch=[16, 1])
fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
sharders = [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
fused_kernel = [EmbeddingComputeKernel.FUSED.value]
whole = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=fused_kernel)
planner = EmbeddingShardingPlanner(Topology(1, "cpu"), batch_size=4, constraints={"user": whole})
plan = planner.plan(model, sharders)
env = ShardingEnv(world_size=1, rank=0)  # with processes: ShardingEnv.from_process_group(dist.group.WORLD)
parallel = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)
assert ShardingPlan.from_json(parallel.plan.to_json()) == plan
shard = Shard(table="user", rows=Span(0, 50), cols=Span(0, 8), rank=0)  # a plan made by hand has such shards
assert ParameterSharding("table_wise", "fused", shards=[shard]) == next(iter(plan.plan.values()))["user"]
assert any(isinstance(module, ShardedEmbeddingBagCollection) for module in parallel.modules())


def batches() -> list[Batch]:
    ids = torch.randint(50, (10, 8))
    ones = torch.ones(8, dtype=torch.int64)
    return [
        Batch(torch.rand(4, 3), KeyedJaggedTensor(["user", "item"], row, lengths=ones), torch.ones(4)) for row in ids
    ]


dense = torch.optim.Adam(parallel.dense_parameters().values(), lr=0.01)
losses = []
for batch in TrainPipeline(parallel).ahead(batches()):  # the next batch's ids travel meanwhile
    dense.zero_grad()
    loss, _ = parallel(batch)
    loss.backward()  # updates the rows
    dense.step()
    losses.append(float(loss))
assert losses[-1] < losses[0]
