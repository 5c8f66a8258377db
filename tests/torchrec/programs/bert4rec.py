"""BERT4Rec: a transformer over sharded sequence vectors guesses masked items."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ITEMS, MASK, LENGTH, DIM, BATCH = 30, 31, 6, 8, 10


class BERT4Rec(nn.Module):
    def __init__(self, ec: EmbeddingCollection) -> None:
        super().__init__()
        self.ec = ec
        (config,) = ec._embedding_configs
        self.feature = config.feature_names[0]
        self.positions = nn.Parameter(torch.empty(LENGTH, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, config.num_embeddings)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        vectors = self.ec(kjt)[self.feature].to_padded_dense(LENGTH)
        lengths = kjt[self.feature].lengths()
        padded = torch.arange(LENGTH)[None] >= lengths[:, None]
        return self.out(self.encoder(self.norm(vectors + self.positions), src_key_padding_mask=padded))


def batch(step: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Sequences that count on from their first item, some items masked; and what they are, 0 where not masked."""
    numbers = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, LENGTH + 1, (BATCH,), generator=numbers)
    starts = torch.randint(1, ITEMS - LENGTH, (BATCH,), generator=numbers)
    items = starts[:, None] + torch.arange(LENGTH)[None]
    inside = torch.arange(LENGTH)[None] < lengths[:, None]
    masked = inside & (torch.rand(BATCH, LENGTH, generator=numbers) < 0.3)
    ids = torch.where(masked, MASK, items)[inside]
    return KeyedJaggedTensor.from_lengths_sync(["item"], ids, lengths.int()), torch.where(masked, items, 0)


def main() -> list[float]:
    device, losses = torch.device("cpu"), []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        config = EmbeddingConfig(
            name="item_embedding",
            embedding_dim=DIM,
            num_embeddings=ITEMS + 2,
            feature_names=["item"],
            weight_init_max=1.0,
        )
        model = BERT4Rec(EmbeddingCollection(tables=[config], device=device))
        with torch.no_grad():
            for place, (_, weight) in enumerate(sorted(model.named_parameters())):
                weight.copy_(torch.sin(torch.arange(weight.numel()) * 1.3 + place).view(weight.shape) / 2)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        apply_optimizer_in_backward(RowWiseAdagrad, model.ec.parameters(), {"lr": 0.05})
        parallel = DistributedModelParallel(module=model, device=device)
        parallel.load_state_dict(weights)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(parallel.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=0.01),
        )
        optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])
        criterion = nn.CrossEntropyLoss(ignore_index=0)
        for step in range(12):
            kjt, targets = batch(step)
            optimizer.zero_grad()
            loss = criterion(parallel(kjt).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
