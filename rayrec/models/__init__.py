"""Built-in models: each takes a `Batch` and returns (loss, logits `[B]`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.dcn import DCN
from rayrec.models.deepfm import DeepFM
from rayrec.models.dlrm import DLRM
from rayrec.models.loss import mean_loss

# factory(tables, num_dense, device=..., **settings); the tables stay on the meta device until they are sharded
MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": DLRM, "dcn": DCN, "deepfm": DeepFM}

__all__ = ["DCN", "DLRM", "MODELS", "Batch", "DeepFM", "mean_loss"]
