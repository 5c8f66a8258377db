"""Models. Those under their own names here are complete: they take a `Batch` and return (loss, logits `[B]`). The files
`dlrm` and `deepfm` hold models cut as in TorchRec: dense and sparse features in, logits out, parts to combine."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.complete.dcn import DCN
from rayrec.models.complete.deepfm import DeepFM
from rayrec.models.complete.dlrm import DLRM
from rayrec.models.complete.loss import mean_loss

# factory(tables, num_dense, device=..., **settings); the tables stay on the meta device until they are sharded
MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": DLRM, "dcn": DCN, "deepfm": DeepFM}

__all__ = ["DCN", "DLRM", "MODELS", "Batch", "DeepFM", "mean_loss"]
