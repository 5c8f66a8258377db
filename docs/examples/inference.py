"""Scoring with quantized tables in this process, and over the devices of several."""

import tempfile

import torch
import torch.distributed as dist

from rayrec.distributed.comm import Group
from rayrec.inference import ExportOptions
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.inference import quantize_inference_model, shard_quant_model

options = ExportOptions(tables="int8")  # as `rayrec export --tables int8`
assert options.target == "eager"
tables = [EmbeddingBagConfig(50, 8, name, feature_names=[name]) for name in ("user", "item")]
ids = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1]))

model = DLRM(tables, num_dense=3, dense_arch=[16, 8], over_arch=[16, 1], tables_device="cpu")
small = quantize_inference_model(model, per_table_weight_dtype={"item": torch.float16})
_, logits = small(Batch(dense=torch.rand(2, 3), sparse=ids, label=torch.zeros(2)))
assert logits.shape == (2,)

with tempfile.TemporaryDirectory() as folder:  # each process holds a part of the tables; here there is one
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    group: Group = dist.group.WORLD
    quantized = quantize_inference_model(torch.nn.Sequential(EmbeddingBagCollection(tables)))
    before = quantized(ids).values()
    torch.testing.assert_close(shard_quant_model(quantized, group)(ids).values(), before)
    dist.destroy_process_group()
