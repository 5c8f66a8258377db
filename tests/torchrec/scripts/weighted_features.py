"""Ids with weights and weights of positions: a feature-processed collection on one process."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict

from tests.torchrec.scripts.given import draws, fill


def train(steps: int) -> list[float]:
    features = {"a": 20, "b": 30}
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=rows, feature_names=[name])
        for name, rows in features.items()
    ]
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, is_weighted=True), PositionWeightedModuleCollection({"a": 4, "b": 4})
    )
    weighted = EmbeddingBagCollection(tables=tables, is_weighted=True)
    model = fill(nn.ModuleList([processed, weighted, nn.Linear(16, 1)]))
    regroup = KTRegroupAsDict([["b", "a"]], ["all"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _, ids, lengths, labels in draws(features, 8, steps):
        optimizer.zero_grad()
        given = KeyedJaggedTensor(list(features), ids, torch.cos(ids.float()), lengths=lengths)
        blocks = [regroup([model[0](given)])["all"], regroup([model[1](given)])["all"]]
        logits = model[2](torch.cat(blocks, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
