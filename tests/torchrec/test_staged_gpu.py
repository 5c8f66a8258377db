"""Staged pipelines, whose ids are sent on a stream of their own: memory of that stream is read by the model's until the
end of backward, however far the host is ahead."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from rayrec.torchrec.distributed import DistributedModelParallel, ShardingEnv
from rayrec.torchrec.distributed.train_pipeline import PipelineStage, SparseDataDistUtil, StagedTrainPipeline
from tests.ranks import on_ranks

BATCHES = 12


class Means(nn.Module):
    """Means of bags, which need factors that routing sends along."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"], pooling=PoolingType.MEAN
        )
        self.ebc = EmbeddingBagCollection([table], device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


def batches_of(size: int) -> list[KeyedJaggedTensor]:
    """All bags of a batch are equally long, another length in each batch: another batch's factors would show."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(BATCHES):
        bag = 1 + number * 7 % 20
        ids = torch.randint(1000, (size * bag,), generator=generator)
        batches.append(KeyedJaggedTensor(["f"], ids, lengths=torch.full((size,), bag)))
    return batches


def trained(group: dist.ProcessGroup, device: torch.device, size: int, staged: bool) -> torch.Tensor:
    """The table after a step a batch, through a pipeline of two stages or in a plain loop."""
    torch.manual_seed(1)  # of the first weights
    dmp = DistributedModelParallel(Means(), ShardingEnv.from_process_group(group), device)
    on_gpu = device.type == "cuda"
    batches = [batch.pin_memory() for batch in batches_of(size)] if on_gpu else batches_of(size)
    ids = SparseDataDistUtil(dmp, None)
    first, second = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
    stages = [
        PipelineStage("copy", lambda batch: batch.to(device, non_blocking=True), first),
        PipelineStage("ids", ids.start_sparse_data_dist, second),
    ]
    pipeline, source = StagedTrainPipeline(stages), iter(batches)
    while (batch := pipeline.progress(source) if staged else next(source, None)) is not None:
        out = dmp(batch if staged else batch.to(device))
        if on_gpu and staged:
            torch.cuda._sleep(200_000_000)  # the host goes on to send the next batches meanwhile
        (out * out).sum().backward()
    (table,) = dmp.tables().values()
    return table.local[0].weight.cpu().clone()


def on_a_cpu(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    cpu = torch.device("cpu")
    return trained(group, cpu, 64, staged=True), trained(group, cpu, 64, staged=False)


def test_a_staged_pipeline_trains_as_the_plain_loop_does() -> None:
    for staged, plain in on_ranks(2, on_a_cpu):
        assert torch.equal(staged, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_memory_of_the_stage_is_read_until_the_end_of_backward() -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            assert dist.group.WORLD is not None
            staged = trained(dist.group.WORLD, device, 65_536, staged=True)
            plain = trained(dist.group.WORLD, device, 65_536, staged=False)
        finally:
            dist.destroy_process_group()
    torch.testing.assert_close(staged, plain, atol=1e-5, rtol=1e-4)
