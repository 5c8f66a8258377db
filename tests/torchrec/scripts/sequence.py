"""Histories as sequences: an EmbeddingCollection, padded vectors, a recurrent net."""

import copy

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.torchrec.scripts.given import draws, fill


class Reader(nn.Module):
    def __init__(self, ec: EmbeddingCollection) -> None:
        super().__init__()
        self.ec, self.gru, self.out = ec, nn.GRU(8, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        history = self.ec(kjt)["history"]
        _, last = self.gru(history.to_padded_dense(4))
        return self.out(last[0]).squeeze(1)


def train(steps: int) -> list[float]:
    features = {"history": 40}
    config = EmbeddingConfig(name="t_items", embedding_dim=8, num_embeddings=40, feature_names=["history"])
    model = fill(Reader(EmbeddingCollection(tables=[config], device=torch.device("cpu"))))
    apply_optimizer_in_backward(torch.optim.SGD, model.ec.parameters(), {"lr": 0.3})
    weights = copy.deepcopy(model.state_dict())
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    model.load_state_dict(weights)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.2)
    )
    losses = []
    for _, ids, lengths, labels in draws(features, 10, steps):
        optimizer.zero_grad()
        logits = model(KeyedJaggedTensor.from_lengths_sync(["history"], ids, lengths))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
