"""Each id once: a batch whose features hold no id twice, and where each of the original ids is found in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rayrec.distributed.kernel import RowGroups
from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class Duplicates:
    """What was taken out.

    Args:
        inverse: for each original id, its place among the distinct ids of all features.
        groups: which original ids are the same.
        lengths_F: original ids of each feature.
    """

    inverse: torch.Tensor
    groups: RowGroups
    lengths_F: torch.Tensor


class Dedup:
    """Takes duplicates out of the features that `tables` read, on the host.

    Args:
        tables: in the order of the collection.
        features: of the routes, in their order.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], features: Sequence[str]) -> None:
        self._features = list(features)
        rows = [max(table.num_embeddings for table in tables if feature in table.feature_names) for feature in features]
        # ids of different features in ranges of their own, so that one pass finds the distinct ids of all
        self._edges = torch.tensor([0, *accumulate(rows)], dtype=torch.int64)

    def apply(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Duplicates]:
        """The distinct ids of each feature, ascending, as one example; and how to get back.

        Args:
            kjt: a batch of one example, every id inside its table.
        """
        index = kjt.index_per_key()
        places = [index[feature] for feature in self._features]
        lengths_F, values = kjt.lengths(), kjt.values()
        if places != list(range(len(index))):
            order = torch.tensor(places, dtype=torch.int32)
            lengths_F1, values, _ = ops.permute_segments(order, lengths_F.view(-1, 1), values)
            lengths_F = lengths_F1.view(-1)
        firsts = self._edges[:-1]
        numbers = values.to(torch.int64) + firsts.repeat_interleave(lengths_F, output_size=values.numel())
        groups = RowGroups.of(numbers)
        distinct = groups.distinct
        ends = torch.searchsorted(distinct, self._edges)
        counts = ends[1:] - ends[:-1]
        ids = (distinct - firsts.repeat_interleave(counts, output_size=distinct.numel())).to(values.dtype)
        return KeyedJaggedTensor(self._features, ids, lengths=counts, stride=1), Duplicates(
            _inverse(groups), groups, lengths_F
        )


def _inverse(groups: RowGroups) -> torch.Tensor:
    """For each row number its place among the distinct ones; the sort that found them is not done again."""
    marks = torch.zeros_like(groups.order)
    marks[groups.starts[1:]] = 1
    return torch.empty_like(marks).index_copy_(0, groups.order, marks.cumsum(0))
