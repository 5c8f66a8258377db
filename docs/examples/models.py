"""Built-in models: a batch in, loss and logits out."""

import torch

from rayrec.models import (
    DCN,
    DIN,
    DLRM,
    ESMM,
    GDCN,
    MODELS,
    PLE,
    AutoInt,
    Batch,
    DeepFM,
    FinalMLP,
    HSTURanker,
    MaskNet,
    WideDeep,
    Wukong,
    XDeepFM,
    bst,
    hstu,
    mean_loss,
    mmoe,
    sasrec,
)
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

tables = [EmbeddingBagConfig(50, 8, name, feature_names=[name]) for name in ("item", "seen")]
ids = KeyedJaggedTensor(["item", "seen"], torch.tensor([7, 9, 1, 2, 3]), lengths=torch.tensor([1, 1, 2, 1]))
batch = Batch(dense=torch.rand(2, 3), sparse=ids, label=torch.tensor([1.0, 0.0]))

here = {"tables_device": "cpu"}  # without it the tables wait for DistributedModelParallel
attention = [{"history": ["seen"], "target": ["item"]}]
for model in (
    DLRM(tables, num_dense=3, dense_arch=[16, 8], over_arch=[16, 1], **here),
    DCN(tables, num_dense=3, dense_arch=[16, 8], over_arch=[16, 1], cross_layers=2, cross_rank=4, **here),
    GDCN(tables, num_dense=3, over_arch=[16, 1], **here),
    DeepFM(tables, num_dense=3, deep_arch=[16, 1], **here),
    XDeepFM(tables, num_dense=3, deep_arch=[16, 1], **here),
    WideDeep(tables, num_dense=3, deep_arch=[16, 1], **here),
    AutoInt(tables, num_dense=3, **here),
    MaskNet(tables, num_dense=3, over_arch=[16, 1], **here),
    FinalMLP(tables, num_dense=3, first_context=["item"], **here),
    Wukong(tables, num_dense=3, over_arch=[16, 1], **here),
    DIN(tables, num_dense=3, attention=attention, over_arch=[16, 1], **here),
    bst(tables, num_dense=3, attention=attention, over_arch=[16, 1], max_length=4, **here),
    HSTURanker(tables, num_dense=3, attention=attention, over_arch=[16, 1], max_length=4, **here),
):
    loss, logits = model(batch)
    loss.backward()
    assert logits.shape == (2,)
    torch.testing.assert_close(loss, mean_loss(logits, batch))

# Several labels: a column of `label` for each task.
two = Batch(dense=batch.dense, sparse=ids, label=torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
for tasks in (mmoe(tables, 3, task_weights=[1.0, 1.0], **here), PLE(tables, 3, task_weights=[1.0, 1.0], **here)):
    assert tasks(two)[1].shape == (2, 2)
clicks_and_sales = ESMM(tables, 3, task_weights=[1.0, 1.0], **here)
assert clicks_and_sales(two)[1].shape == (2, 2)

# Retrievers have vectors of users and of items.
items = [EmbeddingConfig(50, 8, "item", feature_names=["seen"])]
for retriever in (sasrec(items, 0, history="seen", **here), hstu(items, 0, history="seen", **here)):
    assert retriever.num_items == 50
print("names for model.name in a config:", ", ".join(MODELS))
