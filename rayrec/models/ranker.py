"""What rankers with histories or several tasks share: one vector a row from dense features, bags and attended lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.lookup import Lookup
from rayrec.modules.target_attention import TargetAttention


@dataclass(frozen=True, slots=True)
class Attended:
    """A history that is weighed by its likeness to a candidate.

    Args:
        history: features of kind `id_list` of one sequence.
        target: for each of them the candidate's feature, read from a table of the same width (the same table, mostly).
    """

    history: list[str]
    target: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerInputs:
    """What every ranker's input is made of.

    Args:
        attention: histories that are attended to; the other lists are pooled.
        hidden: layer widths of each attention's network.
        softmax: an attention's weights add up to 1.
        is_weighted, device, tables_device, seed: as of `DLRM`.
    """

    attention: Sequence[Attended | Mapping[str, Any]] = ()
    hidden: Sequence[int] = (64, 16)
    softmax: bool = False
    is_weighted: bool = False
    device: torch.device | str | None = None
    tables_device: torch.device | str | None = "meta"
    seed: int | None = None


class RankerInput(nn.Module):
    """Dense features, pooled vectors and attended histories next to each other.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N.

    Raises:
        ValueError: histories and targets that do not fit together.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], num_dense: int, inputs: RankerInputs) -> None:
        super().__init__()
        self.attended = [one if isinstance(one, Attended) else Attended(**one) for one in inputs.attention]
        by_id = [feature for one in self.attended for feature in one.history]
        self.lookup = Lookup(tables, by_id, inputs.is_weighted, inputs.tables_device, inputs.seed)
        widths = self.lookup.widths
        self.attention = nn.ModuleList()
        for one in self.attended:
            _check(one, self.lookup)
            dim = sum(widths[feature] for feature in one.history)
            self.attention.append(TargetAttention(dim, inputs.hidden, inputs.softmax, device=inputs.device))
        self.width = num_dense + sum(widths[name] for name in (*self.lookup.pooled_names, *by_id))

    def forward(self, batch: Batch) -> torch.Tensor:
        """`[B, width]`."""
        vectors = self.lookup(batch.sparse)
        parts = [batch.dense, *vectors.pooled.values()]
        for one, attention in zip(self.attended, self.attention, strict=True):
            jagged = [vectors.by_id[feature] for feature in one.history]
            query_BD = torch.cat([vectors.pooled[feature] for feature in one.target], dim=1)
            keys_TD = torch.cat([feature.values() for feature in jagged], dim=1)
            parts.append(attention(query_BD, keys_TD, jagged[0].lengths()))
        return torch.cat(parts, dim=1)


def _check(one: Attended, lookup: Lookup) -> None:
    if len(one.history) != len(one.target) or not one.history:
        raise ValueError(f"attention: history={one.history} and target={one.target} must be of one length, at least 1")
    for history, target in zip(one.history, one.target, strict=True):
        if target not in lookup.pooled_names or history not in lookup.widths:
            raise ValueError(f"attention: target {target!r} must be a feature that is read as a bag, not a history")
        if lookup.widths[history] != lookup.widths[target]:
            raise ValueError(
                f"attention: {history!r} has vectors of {lookup.widths[history]} numbers and its target {target!r} of "
                f"{lookup.widths[target]}; let one table read both"
            )
