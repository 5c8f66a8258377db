"""`Ranker`: the contract of models that score rows, and what those with histories share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.lookup import Lookup
from rayrec.modules.target_attention import TargetAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What the trainer gives every ranker, as keywords of its constructor.

    Args:
        is_weighted: ids carry weights.
        task_weights: of several labels' losses; None for one label.
        label_kinds: "binary" or "number" for each label; None: all binary.
        device: of the dense part.
        tables_device: the tables lie on "meta" until they are sharded.
        seed: of the tables' first weights.
    """

    is_weighted: bool = False
    task_weights: Sequence[float] | None = None
    label_kinds: Sequence[str] | None = None
    device: torch.device | str | None = None
    tables_device: torch.device | str | None = "meta"
    seed: int | None = None

    @property
    def num_labels(self) -> int:
        return 1 if self.task_weights is None else len(self.task_weights)

    def bags(self, tables: Sequence[EmbeddingBagConfig]) -> EmbeddingBagCollection:
        """The tables as one collection."""
        return EmbeddingBagCollection(list(tables), self.is_weighted, device=self.tables_device, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryInputs(ModelInputs):
    """The same, and which lists a ranker weighs by the candidate.

    Args:
        attention: histories that are weighed by their likeness to the candidate, each `{history: [features], target:
            [features]}`; a target is null where the candidate has no such feature, as the stars that an item got. Other
            lists are pooled.
        attention_hidden: layer widths of each attention's network, without the last one of 1.
        softmax: the weights of a history add up to 1; DIN leaves them as they are.
        dropout: in all layers but those of the attention.
    """

    attention: Sequence[dict[str, list[Any]]] = ()
    attention_hidden: Sequence[int] = (64, 16)
    softmax: bool = False
    dropout: float = 0.0

    def target_attention(self, dim: int) -> TargetAttention:
        """DIN's, over vectors of a width."""
        return TargetAttention(dim, self.attention_hidden, self.softmax, device=self.device)


class Ranker(nn.Module, ABC):
    """A model that gives each row one output a label; the head makes them logits and the loss.

    Args:
        inputs: of the trainer.
    """

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.head = Head(inputs.task_weights, inputs.device, inputs.label_kinds)

    @abstractmethod
    def outputs(self, batch: Batch) -> torch.Tensor:
        """`[B, T]`, T the number of labels."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B]`, or `[B, T]` of several labels)."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.outputs(batch), batch)
        return loss_and_logits


class RankerInput(nn.Module):
    """Dense features, pooled vectors and attended histories next to each other.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N.
        attend: makes the module that turns queries `[B, D]`, keys `[T, D]` and lengths `[B]` into `[B, D]`, of D; by
            default `TargetAttention`.

    Raises:
        ValueError: histories and targets that do not fit together.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        inputs: HistoryInputs,
        attend: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.attended = [(list(one["history"]), list(one["target"])) for one in inputs.attention]
        by_id = [feature for history, _ in self.attended for feature in history]
        self.lookup = Lookup(tables, by_id, inputs.is_weighted, inputs.tables_device, inputs.seed)
        widths = self.lookup.widths
        self.attention = nn.ModuleList()
        for history, target in self.attended:
            _check(history, target, self.lookup)
            dim = sum(widths[feature] for feature in history)
            self.attention.append((attend or inputs.target_attention)(dim))
        self.width = num_dense + sum(widths[name] for name in (*self.lookup.pooled_names, *by_id))

    def forward(self, batch: Batch) -> torch.Tensor:
        """`[B, width]`."""
        vectors, widths = self.lookup(batch.sparse), self.lookup.widths
        parts = [batch.dense, *vectors.pooled.values()]
        for (history, target), attention in zip(self.attended, self.attention, strict=True):
            jagged = [vectors.by_id[feature] for feature in history]
            query = [
                batch.dense.new_zeros(batch.rows, widths[item]) if feature is None else vectors.pooled[feature]
                for item, feature in zip(history, target, strict=True)
            ]
            query_BD = torch.cat(query, dim=1)
            keys_TD = torch.cat([feature.values() for feature in jagged], dim=1)
            parts.append(attention(query_BD, keys_TD, jagged[0].lengths()))
        return torch.cat(parts, dim=1)


def _check(histories: list[str], targets: list[str | None], lookup: Lookup) -> None:
    if len(histories) != len(targets) or not any(targets):
        raise ValueError(f"attention: history={histories} and target={targets} must be of one length, with a target")
    for history, target in zip(histories, targets, strict=True):
        if target is None:
            continue
        if target not in lookup.pooled_names or history not in lookup.widths:
            raise ValueError(f"attention: target {target!r} must be a feature that is read as a bag, not a history")
        if lookup.widths[history] != lookup.widths[target]:
            raise ValueError(
                f"attention: {history!r} has vectors of {lookup.widths[history]} numbers and its target {target!r} of "
                f"{lookup.widths[target]}; let one table read both"
            )
