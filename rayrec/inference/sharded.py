"""Quantized collections over several ranks, for tables that one process cannot hold: each rank keeps some, whole.

Every rank scores its own batch: ids go to the ranks that have their tables, pooled vectors come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.embedding import check_features, output_names
from rayrec.quant import EmbeddingBagCollection, TablePlace
from rayrec.quant.layout import TABLE_ALIGNMENT
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


def shard_quant_model(model: nn.Module, group: comm.Group, ranks: Mapping[str, int] | None = None) -> nn.Module:
    """Leaves each rank its own tables of every quantized collection; every rank calls it, and then the model, together.

    Args:
        model: as `quantize_inference_model` gives it, the same on every rank; changed and returned.
        group: gloo for CPU ranks, NCCL for GPUs.
        ranks: table → rank; by default tables are dealt out by their bytes, the largest first.

    Raises:
        ValueError: no quantized collection, a table without a rank, or a rank that is not in the group.
    """
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)]
    if not found:
        raise ValueError("the model has no quantized EmbeddingBagCollection; call quantize_inference_model first")
    size = 1 if group is None else group.size()
    places = [place for _, module in found for place in module.places]
    owners = dict(ranks) if ranks is not None else _dealt(places, size)
    for place in places:
        if not 0 <= owners.get(place.table, -1) < size:
            raise ValueError(f"table {place.table!r}: its rank must be one of 0 to {size - 1}; give it in `ranks`")
    for path, module in found:
        made = ShardedQuantEmbeddingBagCollection(module, group, owners)
        if not path:
            return made
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
    return model


class ShardedQuantEmbeddingBagCollection(nn.Module):
    """Equal to the quantized collection that it is made of, and so to the last bit: tables are not cut.

    Args:
        owners: table → rank.
    """

    def __init__(self, whole: EmbeddingBagCollection, group: comm.Group, owners: Mapping[str, int]) -> None:
        super().__init__()
        self._group = group
        self._rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self._configs = whole.embedding_bag_configs()
        self._is_weighted = whole.is_weighted()
        self._names = [name for names in output_names(self._configs) for name in names]
        self._tables_R = [[c for c in self._configs if owners[c.name] == rank] for rank in range(size)]
        self._features_R = [
            list(dict.fromkeys(f for c in tables for f in c.feature_names)) for tables in self._tables_R
        ]
        self._width_R = [sum(c.embedding_dim * len(c.feature_names) for c in tables) for tables in self._tables_R]
        self.own = _only(whole, self._tables_R[self._rank]) if self._tables_R[self._rank] else None

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """As the whole collection's; a collective.

        Raises:
            ValueError: a feature or weights are missing; or, on the rank that holds the table, an id is outside it.
        """
        check_features(features, [name for names in self._features_R for name in names])
        features = features.expanded()
        parts = [[features[name] for name in names] for names in self._features_R]
        empty = features.values().new_empty(0)
        ids = [torch.cat([part.values() for part in of] or [empty]) for of in parts]
        lengths = [torch.cat([part.lengths().to(empty.dtype) for part in of] or [empty]) for of in parts]
        sizes = torch.tensor([[features.stride(), len(of)] for of in ids], device=empty.device)
        told = _exchanged([*sizes], [2] * len(ids), self._group)
        strides, counts = ([int(of[k]) for of in told] for k in (0, 1))
        bags = [len(self._features_R[self._rank]) * stride for stride in strides]
        got_lengths = _exchanged(lengths, bags, self._group)
        got_ids = _exchanged(ids, counts, self._group)
        got_weights: Sequence[torch.Tensor | None] = [None] * len(ids)
        if self._is_weighted:
            nothing = torch.empty(0, device=empty.device)
            weights = [torch.cat([part.weights().float() for part in of] or [nothing]) for of in parts]
            got_weights = _exchanged(weights, counts, self._group)
        pooled = [self._pooled(*of).reshape(-1) for of in zip(got_ids, got_lengths, got_weights, strides, strict=True)]
        stride = features.stride()
        back = _exchanged(pooled, [stride * width for width in self._width_R], self._group)
        return self._in_order([of.view(stride, width) for of, width in zip(back, self._width_R, strict=True)])

    def _pooled(
        self, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, stride: int
    ) -> torch.Tensor:
        """`[B, D]` of this rank's tables, for one rank's batch."""
        if self.own is None:
            return torch.empty(stride, 0, device=ids.device)
        keys = self._features_R[self._rank]
        return self.own(KeyedJaggedTensor(keys, ids, weights, lengths=lengths, stride=stride)).values()

    def _in_order(self, vectors_R: Sequence[torch.Tensor]) -> KeyedTensor:
        """The tables' vectors in the order of the whole collection."""
        by_table: dict[str, torch.Tensor] = {}
        for tables, vectors in zip(self._tables_R, vectors_R, strict=True):
            widths = [config.embedding_dim * len(config.feature_names) for config in tables]
            by_table |= zip((config.name for config in tables), vectors.split(widths, dim=1), strict=True)
        widths = [config.embedding_dim for config in self._configs for _ in config.feature_names]
        return KeyedTensor(self._names, widths, torch.cat([by_table[c.name] for c in self._configs], dim=1))


def _exchanged(parts: Sequence[torch.Tensor], counts: Sequence[int], group: comm.Group) -> list[torch.Tensor]:
    """Part r goes to rank r; `counts[r]` numbers come from it."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(counts))
    comm.all_to_all(got, sent, list(counts), [part.numel() for part in parts], group)()
    return list(got.split(list(counts)))


def _only(whole: EmbeddingBagCollection, tables: Sequence[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    """A collection of some of the tables, with a copy of their bytes alone."""
    assert whole.weights is not None, "a collection that is quantized in memory holds its tables"
    by_name = {place.table: place for place in whole.places}
    moved: list[TablePlace] = []
    pieces: list[torch.Tensor] = []
    at = 0
    for config in tables:
        place = by_name[config.name]
        size = -(-(place.end - place.begin) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
        piece = whole.weights.new_zeros(size)
        piece[: place.end - place.begin] = whole.weights[place.begin : place.end]
        moved.append(replace(place, begin=at))
        pieces.append(piece)
        at += size
    return EmbeddingBagCollection(list(tables), moved, torch.cat(pieces), whole.is_weighted(), whole.row_alignment)


def _dealt(places: Sequence[TablePlace], size: int) -> dict[str, int]:
    """Each table to the rank that has the fewest bytes so far, the largest table first."""
    held, owners = [0] * size, {}
    for place in sorted(places, key=lambda place: (place.begin - place.end, place.table)):
        rank = held.index(min(held))
        owners[place.table] = rank
        held[rank] += place.end - place.begin
    return owners
