"""Wide & Deep: a linear model beside an MLP (Cheng et al. 2016, arXiv:1606.07792)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class WideDeep(Ranker):
    """Click probability: logit = bias + wide · x + MLP(deep x).

    The wide part is linear in the vectors of `wide`. A table of dim 1 that reads an id or a cross of the schema has a
    weight for each id, as in the paper. The deep part reads the other features and the numbers.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        deep_arch: layer widths of the MLP; the last is the number of labels.
        wide: features of the wide part; of a feature that several tables read, `feature@table`. Empty: the wide part
            is linear in all vectors and numbers, which the deep part reads as well.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        wide: Sequence[str] = (),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings)
        columns = range(self.input.width)
        in_wide = self.input.columns(wide, "wide_deep: wide")
        in_deep = [column for column in columns if column not in set(in_wide)]
        self.register_buffer("_in_wide", torch.tensor(in_wide or [*columns], device=settings.device), persistent=False)
        self.register_buffer("_in_deep", torch.tensor(in_deep, device=settings.device), persistent=False)
        self.wide = nn.Linear(len(in_wide or columns), settings.num_labels, device=settings.device)
        self.deep = settings.mlp(len(in_deep), deep_arch, logits_of="wide_deep.deep_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        features = self.input(batch)
        wide, deep = features.index_select(1, self._in_wide), features.index_select(1, self._in_deep)
        outputs_BT: torch.Tensor = self.wide(wide) + self.deep(deep)
        return outputs_BT
