"""Two towers on MovieLens's ratings, and retrieval from quantized tables."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES, movielens_20m
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper

USERS, MOVIES, BATCH = 24, 40, 32


def write_ratings(folder: str) -> None:
    numbers = torch.Generator().manual_seed(11)
    with open(os.path.join(folder, "ratings.csv"), "w", encoding="utf-8") as file:
        file.write(",".join(DEFAULT_RATINGS_COLUMN_NAMES) + "\n")
        for time in range(12 * BATCH):
            user, movie = (
                int(torch.randint(USERS, (), generator=numbers)),
                int(torch.randint(MOVIES, (), generator=numbers)),
            )
            file.write(f"{user},{movie},{(user * movie) % 10 / 2},{time}\n")


class TwoTower(nn.Module):
    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = collection
        self.query, self.candidate = MLP(8, [16, 8]), MLP(8, [16, 8])

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(kjt)
        return self.query(pooled["userId"]), self.candidate(pooled["movieId"])


class Training(nn.Module):
    def __init__(self, towers: TwoTower) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, kjt: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        query, candidate = self.towers(kjt)
        return F.binary_cross_entropy_with_logits((query * candidate).sum(dim=1), labels)


def features(users: list[int], movies: list[int]) -> KeyedJaggedTensor:
    lengths = torch.ones(2 * len(users), dtype=torch.int32)
    return KeyedJaggedTensor.from_lengths_sync(["userId", "movieId"], torch.tensor(users + movies), lengths)


def towers() -> TwoTower:
    tables = [
        EmbeddingBagConfig(name="t_user", embedding_dim=8, num_embeddings=USERS, feature_names=["userId"]),
        EmbeddingBagConfig(name="t_movie", embedding_dim=8, num_embeddings=MOVIES, feature_names=["movieId"]),
    ]
    model = TwoTower(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")))
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(model.named_parameters())):
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.9 + place).view(weight.shape) / 2)
    return model


def main() -> list[float]:
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        write_ratings(folder)
        task = Training(towers())
        weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
        codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP32, CommType.FP32))
        sharders: list[ModuleSharder] = [
            EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.3}, qcomm_codecs_registry=codecs)
        ]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("t_user", "t_movie")},
        )
        plan = planner.collective_plan(task, sharders, dist.GroupMember.WORLD)
        model = DistributedModelParallel(task, device=torch.device("cpu"), plan=plan, sharders=sharders)
        model.load_state_dict(weights)
        dense = {name: value for name, value in model.named_parameters() if "ebc" not in name}
        optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.02))
        for rows in movielens_20m(folder).batch(BATCH):
            kjt = features([row["userId"] for row in rows], [row["movieId"] for row in rows])
            optimizer.zero_grad()
            loss = model(kjt, torch.tensor([float(row["rating"] > 2) for row in rows]))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        trained = towers()
        state = {
            name.removeprefix("towers."): value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
            for name, value in model.state_dict().items()
        }
        trained.load_state_dict(state)
        serving = quantize_embeddings(trained, dtype=torch.qint8, inplace=True)
        with torch.no_grad():
            query, candidates = serving(features([3] * MOVIES, list(range(MOVIES))))
        found = torch.topk((query * candidates).sum(dim=1), 5)
        losses += [*found.values.tolist(), *map(float, found.indices)]
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
