"""Models as TorchEasyRec builds them: pooled groups and attended sequences, two tasks, traced and quantized."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.mlp import MLP
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.streamable import Pipelineable

DIM, BATCH, LENGTH = 8, 9, 5
ROWS = {"user": 30, "item": 40, "tags": 12, "clicked": 40}
GROUPS = {"wide": ["user", "item"], "deep": ["user", "item", "tags"]}


class Batch(Pipelineable):
    """As its data parser gives it."""

    def __init__(self, pooled: KeyedJaggedTensor, clicks: KeyedJaggedTensor, dense: KeyedTensor, labels: Any) -> None:
        self.pooled, self.clicks, self.dense, self.labels = pooled, clicks, dense, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        labels = {name: value.to(device, non_blocking=non_blocking) for name, value in self.labels.items()}
        moved = [part.to(device, non_blocking=non_blocking) for part in (self.pooled, self.clicks, self.dense)]
        return Batch(*moved, labels)

    def record_stream(self, stream: Any) -> None:
        for part in (self.pooled, self.clicks, self.dense):
            part.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return Batch(self.pooled.pin_memory(), self.clicks.pin_memory(), self.dense, self.labels)


class EmbeddingGroup(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=f"{name}_emb",
                embedding_dim=DIM,
                num_embeddings=ROWS[name],
                feature_names=[name],
                pooling=PoolingType.MEAN if name == "tags" else PoolingType.SUM,
            )
            for name in ("user", "item", "tags")
        ]
        sequences = [EmbeddingConfig(name="click_emb", embedding_dim=DIM, num_embeddings=40, feature_names=["clicked"])]
        self.ebc = EmbeddingBagCollection(bags, device=device)
        self.ec = EmbeddingCollection(sequences, device=device)

    def forward(
        self, pooled: KeyedJaggedTensor, clicks: KeyedJaggedTensor, dense: KeyedTensor
    ) -> dict[str, torch.Tensor]:
        found = KeyedTensor.regroup_as_dict(
            [self.ebc(pooled), dense], [GROUPS["wide"], [*GROUPS["deep"], "age"], ["item"]], ["wide", "deep", "query"]
        )
        jagged: dict[str, JaggedTensor] = self.ec(clicks)
        found["sequence"] = jagged["clicked"].to_padded_dense(LENGTH)
        found["lengths"] = jagged["clicked"].lengths()
        return found


class MultiTowerDIN(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup(device)
        self.attention = MLP(4 * DIM, [8, 1], activation="relu")
        self.experts = nn.ModuleList(MLP(4 * DIM + 2, [8]) for _ in range(2))
        self.towers = nn.ModuleDict({task: nn.Linear(8 + 2 * DIM, 1) for task in ("click", "buy")})

    def attended(self, query: torch.Tensor, sequence: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        queries = query.unsqueeze(1).expand(-1, LENGTH, -1)
        scores = self.attention(torch.cat([queries, sequence, queries - sequence, queries * sequence], -1))
        inside = torch.arange(LENGTH).unsqueeze(0) < lengths.unsqueeze(1)
        return (scores.masked_fill(~inside.unsqueeze(-1), -1e4).softmax(1) * sequence).sum(1)

    def forward(
        self, pooled: KeyedJaggedTensor, clicks: KeyedJaggedTensor, dense: KeyedTensor
    ) -> dict[str, torch.Tensor]:
        groups = self.embedding_group(pooled, clicks, dense)
        deep = torch.cat([groups["deep"], self.attended(groups["query"], groups["sequence"], groups["lengths"])], -1)
        shared = torch.stack([expert(deep) for expert in self.experts]).mean(0)
        towers = torch.cat([shared, groups["wide"]], -1)
        return {f"logits_{task}": tower(towers).squeeze(-1) for task, tower in self.towers.items()}


class TrainWrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = self.model(batch.pooled, batch.clicks, batch.dense)
        losses = [
            nn.functional.binary_cross_entropy_with_logits(found[f"logits_{task}"], batch.labels[task])
            for task in ("click", "buy")
        ]
        total = torch.stack(losses).sum()
        return total, {"loss": total.detach(), **found}


def batch_of(step: int) -> Batch:
    numbers = torch.Generator().manual_seed(step)
    lengths = torch.cat([torch.ones(2 * BATCH).int(), torch.randint(0, 4, (BATCH,), generator=numbers).int()])
    counts = {"user": BATCH, "item": BATCH, "tags": int(lengths[2 * BATCH :].sum())}
    ids = {name: torch.randint(ROWS[name], (count,), generator=numbers) for name, count in counts.items()}
    pooled = KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths)
    seen = torch.randint(1, LENGTH + 1, (BATCH,), generator=numbers)
    clicked = torch.randint(ROWS["clicked"], (int(seen.sum()),), generator=numbers)
    clicks = KeyedJaggedTensor.from_lengths_sync(["clicked"], clicked, seen.int())
    dense = KeyedTensor.from_tensor_list(["age"], [torch.rand(BATCH, 2, generator=numbers)])
    labels = {"click": (ids["item"] % 2).float(), "buy": (ids["user"] % 3 == 0).float()}
    return Batch(pooled, clicks, dense, labels)


def main() -> list[float]:
    device, losses = torch.device("cpu"), []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        module = TrainWrapper(MultiTowerDIN(device))
        with torch.no_grad():
            for place, (_, weight) in enumerate(sorted(module.named_parameters())):
                weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.53 + place).view(weight.shape) / 3)
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        sparse = [*module.model.embedding_group.parameters()]
        apply_optimizer_in_backward(Adagrad, sparse, {"lr": 0.1, "eps": 1e-8})
        planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"), batch_size=BATCH)
        plan = planner.collective_plan(module, get_default_sharders(), dist.GroupMember.WORLD)
        model = DistributedModelParallel(module, device=device, plan=plan)
        model.load_state_dict(dict(weights))
        named = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense = KeyedOptimizerWrapper(named, lambda params: torch.optim.Adam(params, lr=0.01))
        pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense]), device)
        batches = iter([batch_of(step) for step in range(12)])
        losses += [float(pipeline.progress(batches)["loss"]) for _ in range(12)]
        dist.destroy_process_group()
    fresh = MultiTowerDIN(device).eval()
    fresh.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    traced = symbolic_trace(fresh)
    batch = batch_of(99)
    small = quantize_embeddings(
        fresh,
        torch.int8,
        inplace=False,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
    )
    with torch.no_grad():
        for scored in (fresh, traced, small):
            found = scored(batch.pooled, batch.clicks, batch.dense)
            losses += [float(found[f"logits_{task}"].sum()) for task in ("click", "buy")]
    return losses


if __name__ == "__main__":
    print(main())
