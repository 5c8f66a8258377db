"""DeepFM with TrainPipelineBase, on one process, tables trained by a dense optimizer."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.deepfm import SimpleDeepFMNN

from tests.torchrec.scripts.given import draws, fill


class Task(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.model(batch.dense_features, batch.sparse_features).squeeze(1)
        loss = nn.functional.binary_cross_entropy(scores, batch.labels.float())
        return loss, loss.detach()


def train(steps: int) -> list[float]:
    features = {"a": 20, "b": 30}
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=6, num_embeddings=rows, feature_names=[name])
        for name, rows in features.items()
    ]
    model = Task(fill(SimpleDeepFMNN(3, EmbeddingBagCollection(tables=tables), 10, 5)))
    pipeline = TrainPipelineBase(model, torch.optim.Adagrad(model.parameters(), lr=0.1), torch.device("cpu"))
    batches = iter(
        [
            Batch(numbers, KeyedJaggedTensor(list(features), ids, lengths=lengths), labels)
            for numbers, ids, lengths, labels in draws(features, 8, steps, 3)
        ]
    )
    return [float(pipeline.progress(batches)) for _ in range(steps)]
