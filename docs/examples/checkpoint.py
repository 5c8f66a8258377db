"""Checkpoints that load under any plan and any number of ranks."""

import tempfile

import torch

from rayrec.checkpoint import Best, Checkpoint, CheckpointStore, NoWholeCheckpointError, Saving, newer_damaged, no_whole
from rayrec.distributed import DistributedModelParallel
from rayrec.models import DLRM
from rayrec.modules import EmbeddingBagConfig


def made() -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    tables = [EmbeddingBagConfig(50, 8, name, feature_names=[name]) for name in ("user", "item")]
    model = DLRM(tables, num_dense=3, dense_arch=[16, 8], over_arch=[16, 1])
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    return parallel, torch.optim.Adam(parallel.dense_parameters().values(), lr=0.01)


with tempfile.TemporaryDirectory() as folder:
    store = CheckpointStore(folder, keep=2, best=Best("auc", larger=True))
    model, optimizer = made()
    store.save(100, model, optimizer, saving=Saving(extra={"epoch": 1}))
    store.note_scores(100, {"auc": 0.7})

    fresh, its_optimizer = made()
    latest = CheckpointStore(folder).latest()
    assert isinstance(latest, Checkpoint) and latest.step == 100 and latest.extra["epoch"] == 1
    store.load(latest, fresh, its_optimizer)
    for (name, value), other in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=name)
    assert not store.damages(latest)
    _, damaged = store.listing()
    assert newer_damaged(latest, damaged) == []  # no newer checkpoint was lost
    error: NoWholeCheckpointError = no_whole(folder, [])
    print(error)
