"""HSTU as a ranker (Zhai et al. 2024, arXiv:2402.17152): context, then a history with its actions, then candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.attention import Layout
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
from rayrec.modules.pooling import row_of
from rayrec.modules.positions import Positions
from rayrec.sparse import KeyedJaggedTensor

# Most candidates of a sequence: rows without history have all the same one.
_CANDIDATES = 256


class Requests(NamedTuple):
    """Rows of a batch that follow each other with equal context and history, and are the candidates of one sequence.

    Args:
        row: `[R]`, the first row of each request.
        of_row: `[B]`, the request of each row.
        place: `[B]`, the number of each row in its request.
    """

    row: torch.Tensor
    of_row: torch.Tensor
    place: torch.Tensor


class HSTURanker(Ranker):
    """HSTU over each request's context, history and candidates, then an MLP per row over it and all features.

    Adjacent rows with the same context and history, e.g. the impressions of a page or the candidates of a request,
    share one sequence. A candidate attends to the context, the history and itself. So its score depends neither on its
    position nor on other candidates.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP; the last is the number of labels.
        attention: the history and the candidate, one `{history: [features], target: [features]}`. Use null as the
            target of what only events have, such as their actions and ages.
        context: pooled features that come before the history, one position each, such as the user.
        max_length: most items in a history; the `length` of its sequence.
        dim: width of the layers; null: the dim of the first feature of the history.
        blocks: number of HSTU layers.
        heads: attention heads.
        qk_dim: width of queries and keys per head; null: `dim` divided by `heads`.
        v_dim: width of values per head; null: `dim` divided by `heads`.
        local: attend to the context and the last `local` positions only (semi-local attention); null: to all.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        context: Sequence[str] = (),
        max_length: int = 256,
        dim: int | None = None,
        blocks: int = 2,
        heads: int = 1,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        local: int | None = None,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        if len(settings.attention) != 1:
            raise ValueError(f"hstu_ranker: attention needs one history with its target, not {len(settings.attention)}")
        super().__init__(tables, num_dense, settings, lambda _: nn.Identity())
        lookup, (self.history, self.target) = self.input.lookup, self.input.attended[0]
        for feature in context:
            if feature not in lookup.pooled_names:
                raise ValueError(f"hstu_ranker: context {feature!r} must be one of {lookup.pooled_names}")
        width, self.context = sum(lookup.widths[feature] for feature in self.history), list(context)
        dim = lookup.widths[self.history[0]] if dim is None else dim
        self.max_length, self.positions_before = max_length, len(self.context)
        # In an exported graph, each row is a request.
        self.width = self.positions_before + max_length + 1
        sizes: dict[str, Any] = {"dim": dim, "blocks": blocks, "heads": heads, "qk_dim": qk_dim, "v_dim": v_dim}
        with torch.device(settings.device or "cpu"):
            self.of_item = nn.Linear(width, dim)
            self.of_context = nn.ModuleList(nn.Linear(lookup.widths[feature], dim) for feature in self.context)
            self.positions = Positions(self.width, dim)
            config = HSTUConfig(
                **sizes, max_length=self.width, dropout=settings.dropout, local=local, prefix=self.positions_before
            )
            self.encoder, self.norm = HSTUEncoder(config), nn.LayerNorm(dim, eps=1e-6)
        self.over_arch = settings.mlp(self.input.width - width + dim, over_arch, logits_of="hstu_ranker.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        lookup = self.input.lookup
        found, widths = lookup(batch.sparse), lookup.widths
        jagged = [found.by_id[feature] for feature in self.history]
        lengths_B = jagged[0].lengths().long()
        items_TD = self.of_item(torch.cat([feature.values() for feature in jagged], dim=1))
        candidates_BD = self.of_item(
            torch.cat(
                [
                    batch.dense.new_zeros(batch.rows, widths[item]) if feature is None else found.pooled[feature]
                    for item, feature in zip(self.history, self.target, strict=True)
                ],
                dim=1,
            )
        )
        context = [layer(found.pooled[name]) for layer, name in zip(self.of_context, self.context, strict=True)]
        encoded_BD = self._encoded(context, items_TD, candidates_BD, lengths_B, self._requests(batch.sparse))
        others = [found.pooled[name] for name in lookup.pooled_names]
        outputs_BT: torch.Tensor = self.over_arch(torch.cat([self.input.numbers(batch), *others, encoded_BD], dim=1))
        return outputs_BT

    def _requests(self, sparse: KeyedJaggedTensor) -> Requests | None:
        """None: each row is a request of its own."""
        if torch.compiler.is_exporting() or self.input.lookup.is_weighted or sparse.stride() < 2:
            return None
        same_B = _equals_row_before(sparse, [*self.history, *self.context])
        rows = torch.arange(len(same_B), device=same_B.device)
        first = torch.where(same_B, 0, rows).cummax(0).values
        starts = (rows - first) % _CANDIDATES == 0
        of_row, row = starts.cumsum(0) - 1, starts.nonzero().flatten()
        if row.shape[0] == starts.shape[0]:
            return None
        return Requests(row, of_row, rows - row[of_row])

    def _encoded(
        self,
        context: list[torch.Tensor],
        items_TD: torch.Tensor,
        candidates_BD: torch.Tensor,
        lengths_B: torch.Tensor,
        requests: Requests | None,
    ) -> torch.Tensor:
        """`[B, D]`, the output at each candidate.

        Args:
            context: `[B, D]` of each position before the history.
        """
        before, device, total_items = self.positions_before, lengths_B.device, items_TD.shape[0]
        row_of_item = row_of(lengths_B, total_items)
        item_place = torch.arange(total_items, device=device) - (lengths_B.cumsum(0) - lengths_B)[row_of_item]
        if requests is None:
            lengths_R, counts_R, request_of_item = lengths_B, torch.ones_like(lengths_B), row_of_item
            of_row, place = torch.arange(lengths_B.shape[0], device=device), torch.zeros_like(lengths_B)
        else:
            row, of_row, place = requests
            lengths_R, counts_R = lengths_B[row], torch.bincount(of_row, minlength=len(row))
            read = torch.zeros(lengths_B.shape[0], dtype=torch.bool, device=device).index_fill(0, row, True)[
                row_of_item
            ]
            items_TD, item_place, request_of_item = items_TD[read], item_place[read], of_row[row_of_item[read]]
            context = [vectors_BD[row] for vectors_BD in context]
        fixed_R = before + lengths_R
        offsets = F.pad((fixed_R + counts_R).cumsum(0), (1, 0))
        starts = offsets[:-1]
        total = items_TD.shape[0] + before * lengths_R.shape[0] + candidates_BD.shape[0]
        at_candidates = starts[of_row] + fixed_R[of_row] + place
        x_TD = items_TD.new_zeros(total, candidates_BD.shape[1])
        for number, vectors_RD in enumerate(context):
            x_TD = x_TD.index_copy(0, starts + number, vectors_RD)
        x_TD = x_TD.index_copy(0, starts[request_of_item] + before + item_place, items_TD)
        x_TD = x_TD.index_copy(0, at_candidates, candidates_BD)
        width = self.width if torch.compiler.is_exporting() else None
        # A single candidate comes last and needs no mask: the causal one is the same.
        layout = Layout(offsets, total=total, width=width, items=None if requests is None else fixed_R)
        encoded_TD = self.encoder(x_TD + self.positions(layout), layout)
        encoded_BD: torch.Tensor = self.norm(encoded_TD.index_select(0, at_candidates))
        return encoded_BD


def _equals_row_before(sparse: KeyedJaggedTensor, features: Sequence[str]) -> torch.Tensor:
    """`[B]` bool: whether a row has the same ids as the row before, in all features."""
    same_B = torch.ones(sparse.stride(), dtype=torch.bool, device=sparse.values().device)
    same_B[:1] = False
    for feature in features:
        ids, lengths = sparse[feature].values(), sparse[feature].lengths().long()
        same_B[1:] &= lengths[1:] == lengths[:-1]
        row = row_of(lengths, len(ids))
        before = (torch.arange(len(ids), device=ids.device) - lengths[row]).clamp(min=0)  # if lengths are equal
        differs = torch.zeros(len(lengths), dtype=torch.int64, device=ids.device)
        same_B &= differs.index_add(0, row, (ids != ids[before]).long()) == 0
    return same_B
