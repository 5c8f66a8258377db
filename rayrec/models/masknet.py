"""MaskNet: layers multiplied by masks that the example itself gives (Wang et al. 2021, arXiv:2102.07619)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.crossnet import check_sizes
from rayrec.modules.norm import LayerNorm


class MaskNet(Ranker):
    """Click probability from mask blocks: ReLU(LN(W (mask ⊙ x))), where mask = W_2 ReLU(W_1 v), v all fields.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP over the blocks; the last is the number of labels.
        blocks: number of mask blocks.
        block_dim: width of the output of each block.
        reduction: hidden width of a mask's network, as a multiple of the width of v.
        parallel: all blocks read the fields, normalized one by one, and the MLP reads all blocks; false: each block
            reads the output of the one before it, and the MLP that of the last.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        blocks: int = 3,
        block_dim: int = 64,
        reduction: float = 1.0,
        parallel: bool = True,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings, fields="masknet")
        check_sizes("masknet", blocks=blocks, block_dim=block_dim)
        width, device, self.parallel = self.input.width, settings.device, parallel
        widths = [width] * blocks if parallel else [width] + [block_dim] * (blocks - 1)
        hidden = max(1, round(width * reduction))
        self.norm = LayerNorm((self.input.num_fields, self.input.dim), device)
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, device=device), nn.ReLU(), nn.Linear(hidden, w, device=device))
            for w in widths
        )
        self.layers = nn.ModuleList(nn.Linear(w, block_dim, bias=False, device=device) for w in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(block_dim, device=device) for _ in widths)
        self.over_arch = settings.mlp(block_dim * (blocks if parallel else 1), over_arch, "masknet.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        fields_BFD = self.input.fields(batch)
        v, x = fields_BFD.flatten(1), self.norm(fields_BFD).flatten(1)
        out, found = x, []
        for mask, layer, norm in zip(self.masks, self.layers, self.norms, strict=True):
            out = torch.relu(norm(layer(mask(v) * (x if self.parallel else out))))
            found.append(out)
        outputs_BT: torch.Tensor = self.over_arch(torch.cat(found, dim=1) if self.parallel else out)
        return outputs_BT
