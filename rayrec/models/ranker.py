"""`Ranker`, the base class of models that score rows, with their settings and their input layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch
from rayrec.models.loss import Head, check_logits
from rayrec.modules import MLP, EmbeddingBagConfig
from rayrec.modules.activation import LayerStyle
from rayrec.modules.lookup import Lookup
from rayrec.modules.norm import BatchNorm
from rayrec.modules.numbers import EncodedVectors, LinearVectors, Periodic, PiecewiseLinear
from rayrec.modules.target_attention import TargetAttention

ActivationName = Literal["relu", "silu", "gelu", "sigmoid", "prelu", "dice", "swish_layernorm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Keyword arguments of every ranker: what the trainer passes, then settings of the input layer and the layers.

    Args:
        is_weighted: ids have weights.
        task_weights: loss weight of each label; None for a single label.
        label_kinds: "binary" or "number" for each label; None: all binary.
        device: device of the dense part.
        tables_device: device of the tables; they stay on "meta" until they are sharded.
        seed: seed of the initial weights of the tables.
        attention: histories with target attention, each `{history: [features], target: [features]}`. Use null as the
            target where the candidate has no matching feature (for example its rating). Other lists are pooled.
        attention_hidden: layer widths of the attention network, without the last layer of width 1.
        attention_activation: activation of the attention network; DIN's is `dice`.
        softmax: normalize the attention weights of a history to a sum of 1; DIN does not.
        numbers: form of the dense features. `plain`: as they are; `linear`: a learned vector each, times the number;
            `periodic`: sines and cosines of learned frequencies, then a layer; `piecewise`: piecewise-linear over
            equal bins of [0, 1], then a layer; use it with the transform `quantile` (Gorishniy et al. 2022).
        number_dim: width of the vectors of numbers; null: the dim of the tables, if all have the same, else 16.
        number_bins: frequencies of `periodic` and bins of `piecewise`, for each number.
        number_sigma: standard deviation of the initial frequencies of `periodic`; tune it, from 0.01 to 10.
        activation: activation of the layers; `dice` and `norm: batch` train with statistics of all ranks' rows, and
            score with running averages.
        norm: normalization before each activation: `batch`, `layer`, or null for none.
        dropout: dropout of all layers except the attention.
    """

    is_weighted: bool = False
    task_weights: Sequence[float] | None = None
    label_kinds: Sequence[str] | None = None
    device: torch.device | str | None = None
    tables_device: torch.device | str | None = "meta"
    seed: int | None = None
    attention: Sequence[dict[str, list[Any]]] = ()
    attention_hidden: Sequence[int] = (64, 16)
    attention_activation: ActivationName = "sigmoid"
    softmax: bool = False
    numbers: Literal["plain", "linear", "periodic", "piecewise"] = "plain"
    number_dim: int | None = None
    number_bins: int = 16
    number_sigma: float = 0.1
    activation: ActivationName = "relu"
    norm: Literal["batch", "layer"] | None = None
    dropout: float = 0.0

    @property
    def num_labels(self) -> int:
        return 1 if self.task_weights is None else len(self.task_weights)

    @property
    def style(self) -> LayerStyle:
        """What follows each layer of the model."""
        return LayerStyle(activation=self.activation, norm=self.norm, dropout=self.dropout)

    def mlp(self, width: int, layers: Sequence[int], logits_of: str | None = None) -> MLP:
        """Creates an MLP with these settings.

        Args:
            width: width of its input.
            layers: layer widths.
            logits_of: "model.setting" of `layers`, if they end with the logits, which have no activation.

        Raises:
            ValueError: `layers` does not end with the number of labels.
        """
        if logits_of is not None:
            model, _, setting = logits_of.partition(".")
            check_logits(model, setting, layers, self.task_weights)
        return MLP(
            width,
            layers,
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
            activation_on_last=logits_of is None,
            device=self.device,
        )

    def number_vectors(self, num: int, dim: int) -> nn.Module:
        """Creates the module from numbers `[B, num]` to vectors `[B, num, dim]`; linear if `numbers` is "plain"."""
        if self.numbers in ("plain", "linear"):
            return LinearVectors(num, dim, self.device)
        if self.numbers == "piecewise":
            return EncodedVectors(PiecewiseLinear(self.number_bins), num, self.number_bins, dim, self.device)
        waves = Periodic(num, self.number_bins, self.number_sigma, self.device)
        return EncodedVectors(waves, num, 2 * self.number_bins, dim, self.device)

    def target_attention(self, dim: int) -> TargetAttention:
        """Creates DIN's attention over vectors of width `dim`."""
        return TargetAttention(dim, self.attention_hidden, self.softmax, self.attention_activation, self.device)


class Ranker(nn.Module, ABC):
    """Base class of models with one output per row and label; the head computes the loss from them.

    Args:
        tables: embedding tables.
        num_dense: N, the number of dense features.
        inputs: settings.
        attend: see `RankerInput`.
        fields: see `RankerInput`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        inputs: ModelInputs,
        attend: Callable[[int], nn.Module] | None = None,
        fields: str | None = None,
    ) -> None:
        super().__init__()
        self.head = Head(inputs.task_weights, inputs.device, inputs.label_kinds)
        self.input = RankerInput(tables, num_dense, inputs, attend, fields)

    @abstractmethod
    def outputs(self, batch: Batch) -> torch.Tensor:
        """Returns `[B, T]`, T the number of labels."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss, and logits `[B]`, or `[B, T]` with several labels."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.outputs(batch), batch)
        return loss_and_logits

    def on_sharded(self, group: comm.Group) -> None:
        """Sets the ranks whose rows normalizations see; called when the tables are sharded over `group`."""
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.sum_over_ranks = partial(_SumOverRanks.apply, group)


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks, whose gradient is summed over ranks. Forward and backward are collective."""

    @staticmethod
    def forward(ctx: Any, group: comm.Group, values: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return comm.all_reduce(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, comm.all_reduce(grads[0].contiguous().clone(), ctx.group)


class RankerInput(nn.Module):
    """The input layer of all rankers: numbers, pooled vectors and attended histories.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features.
        inputs: settings.
        attend: creates, for a width D, the module that maps queries `[B, D]`, keys `[T, D]` and lengths `[B]` to
            `[B, D]`; by default `TargetAttention`.
        fields: name of a model that reads `fields` and therefore needs vectors of one width; numbers become vectors.

    Raises:
        ValueError: histories and targets do not match, or `fields` is set and widths differ.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        inputs: ModelInputs,
        attend: Callable[[int], nn.Module] | None = None,
        fields: str | None = None,
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
        dims = {table.name: table.embedding_dim for table in tables}
        same = len(set(dims.values())) == 1
        if fields is not None and not same:
            raise ValueError(f"{fields}: all tables need the same embedding_dim; they have {dims}")
        table_dim = next(iter(dims.values())) if same else 16
        self.dim = table_dim if inputs.number_dim is None else inputs.number_dim
        if fields is not None and self.dim != table_dim:
            raise ValueError(f"{fields}: number_dim={self.dim} must be the embedding_dim {table_dim}, or null")
        as_vectors = num_dense > 0 and (fields is not None or inputs.numbers != "plain")
        self.number_vectors = inputs.number_vectors(num_dense, self.dim) if as_vectors else None
        self.numbers_width = num_dense * self.dim if as_vectors else num_dense
        self.width = self.numbers_width + sum(widths[name] for name in (*self.lookup.pooled_names, *by_id))

    def columns(self, features: Sequence[str], setting: str) -> list[int]:
        """Returns the columns of pooled features in the output of `forward`.

        Args:
            setting: "model: setting" that names the features, for the error.

        Raises:
            ValueError: no such feature.
        """
        names, widths = self.lookup.pooled_names, self.lookup.widths
        starts = accumulate((widths[name] for name in names), initial=self.numbers_width)
        start_of = dict(zip(names, starts, strict=False))
        for feature in features:
            if feature not in start_of:
                raise ValueError(f"{setting}: {feature!r} is not a pooled feature; these are {', '.join(start_of)}")
        return [start_of[name] + column for name in features for column in range(widths[name])]

    @property
    def num_fields(self) -> int:
        """F, the number of vectors of `fields`."""
        return self.width // self.dim

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns numbers, pooled vectors and attended histories, concatenated: `[B, width]`."""
        return torch.cat([self.numbers(batch), self.vectors(batch)], dim=1)

    def fields(self, batch: Batch) -> torch.Tensor:
        """Returns the same as vectors of one width: `[B, F, D]`."""
        fields_BFD: torch.Tensor = self(batch).unflatten(1, (-1, self.dim))
        return fields_BFD

    def numbers(self, batch: Batch) -> torch.Tensor:
        """Returns `[B, numbers_width]`: the dense features, or their vectors."""
        if self.number_vectors is None:
            return batch.dense
        vectors_BND: torch.Tensor = self.number_vectors(batch.dense)
        return vectors_BND.flatten(1)

    def vectors(self, batch: Batch, bags: nn.Module | None = None) -> torch.Tensor:
        """Returns pooled vectors and attended histories, concatenated: `[B, width - numbers_width]`.

        Args:
            bags: see `Lookup.forward`.
        """
        if not self.attended:  # all tables are in one collection, whose output is concatenated
            collection = self.lookup.bags if bags is None else bags
            assert collection is not None
            pooled_BV: torch.Tensor = collection(batch.sparse).values()
            return pooled_BV
        found, widths = self.lookup(batch.sparse, bags), self.lookup.widths
        columns = [*found.pooled.values()]
        for (history, target), attention in zip(self.attended, self.attention, strict=True):
            jagged = [found.by_id[feature] for feature in history]
            query = [
                batch.dense.new_zeros(batch.rows, widths[item]) if feature is None else found.pooled[feature]
                for item, feature in zip(history, target, strict=True)
            ]
            query_BD = torch.cat(query, dim=1)
            keys_TD = torch.cat([feature.values() for feature in jagged], dim=1)
            columns.append(attention(query_BD, keys_TD, jagged[0].lengths()))
        return torch.cat(columns, dim=1)


class IdWeights(nn.Module):
    """Splits the vectors of an input into fields and the weights that ids have of their own, in tables of dim 1.

    Args:
        model: name of the model, for errors.
        features: features of the tables of dim 1; of a feature that several tables read, `feature@table`.
        source: the input.
        dim: width of all other vectors.

    Attributes:
        num_fields: number of the other vectors, without those of numbers.

    Raises:
        ValueError: `features` are not those of all tables of dim 1, or vectors of numbers have another width.
    """

    _in_weights: torch.Tensor
    _in_fields: torch.Tensor

    def __init__(
        self,
        model: str,
        features: Sequence[str],
        source: RankerInput,
        dim: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        first = source.numbers_width
        in_weights = [column - first for column in source.columns(features, f"{model}: wide")]
        in_fields = [column for column in range(source.width - first) if column not in set(in_weights)]
        if len(in_fields) % dim or len(in_weights) != len(features):
            raise ValueError(
                f"{model}: wide={list(features)} must be all features of the tables of dim 1, and no others"
            )
        if source.number_vectors is not None and source.dim != dim:
            raise ValueError(f"{model}: number_dim={source.dim} must be the embedding_dim {dim}, or null")
        self.num_fields = len(in_fields) // dim
        self.register_buffer("_in_weights", torch.tensor(in_weights, device=device).long(), persistent=False)
        self.register_buffer("_in_fields", torch.tensor(in_fields, device=device).long(), persistent=False)

    def forward(self, vectors_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the fields' vectors `[B, F * D]`, and the sum of the weights `[B, 1]`."""
        weights_BI = vectors_BV.index_select(1, self._in_weights)
        return vectors_BV.index_select(1, self._in_fields), weights_BI.sum(1, keepdim=True)


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
