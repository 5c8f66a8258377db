"""SASRec: a causal transformer over a history (Kang and McAuley 2018, arXiv:1808.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.models.next_item import NextItem
from rayrec.models.retriever import HistoryOf, ItemVectors
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.positions import Positions


def sasrec(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    history: str,
    max_length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    hidden: int | None = None,
    dropout: float = 0.2,
    norm_first: bool = True,
    normalize: bool = False,
    loss: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    tables_device: torch.device | str | None = "meta",
    seed: int | None = None,
) -> NextItem:
    """A next-item model with a transformer.

    Args:
        tables: one of them reads `history`; its rows are the items, its width is the encoder's.
        num_dense: not read.
        history: the feature, a list of items, oldest first.
        max_length, blocks, heads, hidden, dropout, norm_first: of the encoder; see `EncoderConfig`.
        device, tables_device, seed: as of the other models.
        normalize, loss: see `NextItem`.
    """
    item_vectors = ItemVectors(tables, history, tables_device, seed)
    dim = item_vectors.dim
    config = EncoderConfig(dim=dim, blocks=blocks, heads=heads, hidden=hidden, dropout=dropout, norm_first=norm_first)
    with torch.device(device or "cpu"):
        return NextItem(
            item_vectors,
            TransformerEncoder(config),
            HistoryOf(history),
            max_length,
            positions=Positions(max_length, dim),
            dropout=dropout,
            normalize=normalize,
            loss=loss,
        )
