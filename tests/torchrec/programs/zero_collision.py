"""Zero collision hashing in front of a collection, whose trained rows start another model (transfer learning)."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

ROWS, DIM, BATCH = 16, 4, 12


def config() -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="t_item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["item"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        module = MCHManagedCollisionModule(
            zch_size=ROWS,
            device=torch.device("cpu"),
            input_hash_size=4000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        tables = [config()]
        self.mc_ebc = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, device=torch.device("cpu")),
            ManagedCollisionCollection({"t_item": module}, tables),
            return_remapped_features=True,
        )
        self.over = nn.Linear(DIM, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, remapped = self.mc_ebc(kjt)
        return self.over(pooled["item"]).squeeze(1), remapped["item"].values()


def batch(step: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 4, (BATCH,), generator=numbers)
    ids = 100 * torch.randint(5 + step, (int(lengths.sum()),), generator=numbers) + 7
    return KeyedJaggedTensor(["item"], ids, lengths=lengths), torch.randint(2, (BATCH,), generator=numbers).float()


def main() -> list[float]:
    found = []
    model = Model()
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(model.named_parameters())):
            weight.copy_(torch.cos(torch.arange(weight.numel()) * 0.8 + place).view(weight.shape) / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(12):
        kjt, labels = batch(step)
        optimizer.zero_grad()
        logits, rows = model(kjt)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        found += [float(loss), float(rows.double().mean())]
    (trained,) = (value for name, value in model.state_dict().items() if name.endswith("t_item.weight"))
    other = EmbeddingBagCollection(tables=[config()], device=torch.device("cpu"))
    other.load_state_dict({"embedding_bags.t_item.weight": trained})
    kjt = KeyedJaggedTensor(["item"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))
    return found + other(kjt).values().sum(dim=1).tolist()


if __name__ == "__main__":
    print(main())
