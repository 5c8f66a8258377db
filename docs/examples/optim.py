"""Optimizers: of tables inside backward, of dense layers after it, and both under one object."""

import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.optim.rowwise import RowWiseAdagrad
from rayrec.torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "user", feature_names=["user"])])
        self.out = torch.nn.Linear(8, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.out(self.bags(ids).values())


model = Model()
apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.02})  # before sharding
parallel = DistributedModelParallel(model, device=torch.device("cpu"))
rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))  # what no table's optimizer updates
dense = GradientClippingOptimizer(
    KeyedOptimizerWrapper(rest, lambda params: torch.optim.Adam(params, lr=1e-3)),
    clipping=GradientClipping.NORM,
    max_gradient=1.0,
)
warm = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
optimizer = WarmupOptimizer(CombinedOptimizer([parallel.fused_optimizer, dense]), warm, lr=0.02)
for _ in range(2):
    optimizer.zero_grad()
    parallel(KeyedJaggedTensor(["user"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))).sum().backward()
    optimizer.step()
assert any("user" in key for key in optimizer.state_dict()["state"])
