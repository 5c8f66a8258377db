"""The names that most programs need, from `rayrec` itself."""

from typing import Any

import torch

from rayrec import (
    Batch,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    Multistreamable,
    Pipelineable,
    PoolingType,
)

table = EmbeddingBagConfig(
    name="item", num_embeddings=10, embedding_dim=4, feature_names=["item"], pooling=PoolingType.SUM
)
ids = KeyedJaggedTensor(["item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
pooled: KeyedTensor = EmbeddingBagCollection([table])(ids)
assert pooled["item"].shape == (2, 4)
halves = EmbeddingConfig(
    name="seen", num_embeddings=10, embedding_dim=4, feature_names=["item"], data_type=DataType.FP16
)
vectors: dict[str, JaggedTensor] = EmbeddingCollection([halves])(ids)
assert vectors["item"].values().shape == (3, 4)


class MyBatch(Pipelineable):
    """A batch type of your own, which a pipeline can move to its device."""

    def __init__(self, sparse: KeyedJaggedTensor) -> None:
        self.sparse = sparse

    def to(self, device: torch.device, non_blocking: bool = False) -> "MyBatch":
        return MyBatch(self.sparse.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)


assert isinstance(MyBatch(ids).to(torch.device("cpu")), Multistreamable)
assert Batch(dense=torch.rand(2, 1), sparse=ids, label=torch.ones(2)).label.shape == (2,)
