"""`Ranker`, the base class of models that score rows, with their settings and their input layer."""

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
    """Keyword arguments that the trainer passes to every ranker.

    Args:
        is_weighted: ids have weights.
        task_weights: loss weight of each label; None for a single label.
        label_kinds: "binary" or "number" for each label; None: all binary.
        device: device of the dense part.
        tables_device: device of the tables; they stay on "meta" until they are sharded.
        seed: seed of the initial weights of the tables.
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
        """Creates one collection of all tables."""
        return EmbeddingBagCollection(list(tables), self.is_weighted, device=self.tables_device, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryInputs(ModelInputs):
    """`ModelInputs`, and the settings of attention over histories.

    Args:
        attention: histories with target attention, each `{history: [features], target: [features]}`. Use null as the
            target where the candidate has no matching feature (for example its rating). Other lists are pooled.
        attention_hidden: layer widths of the attention network, without the last layer of width 1.
        softmax: normalize the attention weights of a history to a sum of 1; DIN does not.
        dropout: dropout of all layers except the attention.
    """

    attention: Sequence[dict[str, list[Any]]] = ()
    attention_hidden: Sequence[int] = (64, 16)
    softmax: bool = False
    dropout: float = 0.0

    def target_attention(self, dim: int) -> TargetAttention:
        """Creates DIN's attention over vectors of width `dim`."""
        return TargetAttention(dim, self.attention_hidden, self.softmax, device=self.device)


class Ranker(nn.Module, ABC):
    """Base class of models with one output per row and label; the head computes the loss from them.

    Args:
        inputs: settings from the trainer.
    """

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.head = Head(inputs.task_weights, inputs.device, inputs.label_kinds)

    @abstractmethod
    def outputs(self, batch: Batch) -> torch.Tensor:
        """Returns `[B, T]`, T the number of labels."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss, and logits `[B]`, or `[B, T]` with several labels."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.outputs(batch), batch)
        return loss_and_logits


class RankerInput(nn.Module):
    """Concatenates dense features, pooled vectors and attended histories.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features.
        inputs: settings from the trainer.
        attend: creates, for a width D, the module that maps queries `[B, D]`, keys `[T, D]` and lengths `[B]` to
            `[B, D]`; by default `TargetAttention`.

    Raises:
        ValueError: histories and targets do not match.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        inputs: HistoryInputs,
        attend: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.attended = [(list(pair["history"]), list(pair["target"])) for pair in inputs.attention]
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
        """Returns `[B, width]`."""
        vectors, widths = self.lookup(batch.sparse), self.lookup.widths
        columns = [batch.dense, *vectors.pooled.values()]
        for (history, target), attention in zip(self.attended, self.attention, strict=True):
            jagged = [vectors.by_id[feature] for feature in history]
            query = [
                batch.dense.new_zeros(batch.rows, widths[item]) if feature is None else vectors.pooled[feature]
                for item, feature in zip(history, target, strict=True)
            ]
            query_BD = torch.cat(query, dim=1)
            keys_TD = torch.cat([feature.values() for feature in jagged], dim=1)
            columns.append(attention(query_BD, keys_TD, jagged[0].lengths()))
        return torch.cat(columns, dim=1)


def _check(histories: list[str], targets: list[str | None], lookup: Lookup) -> None:
    if len(histories) != len(targets) or not any(targets):
        raise ValueError(
            f"attention: history={histories} and target={targets} must have equal lengths and at least one target"
        )
    for history, target in zip(histories, targets, strict=True):
        if target is None:
            continue
        if target not in lookup.pooled_names or history not in lookup.widths:
            raise ValueError(f"attention: target {target!r} must be a pooled feature, not a history")
        if lookup.widths[history] != lookup.widths[target]:
            raise ValueError(
                f"attention: {history!r} has embedding_dim {lookup.widths[history]}, but its target {target!r} has "
                f"{lookup.widths[target]}; let one table read both"
            )
