"""SASRec: a causal transformer over a history (Kang and McAuley 2018, arXiv:1808.09781)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayrec.models.batch import Batch
from rayrec.models.next_item import NextItem
from rayrec.models.retriever import History, ItemVectors
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.positions import Positions


def make_sasrec(
    item_vectors: ItemVectors,
    history: Callable[[Batch], History],
    *,
    max_length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    hidden: int | None = None,
    dropout: float = 0.2,
    norm_first: bool = True,
    normalize: bool = False,
    loss: dict[str, Any] | None = None,
) -> NextItem:
    """A next-item model with a transformer.

    Args:
        item_vectors: the item table; its width is the encoder's.
        history: a batch's histories.
        max_length, blocks, heads, hidden, dropout, norm_first: of the encoder; see `EncoderConfig`.
        normalize, loss: see `NextItem`.
    """
    dim = item_vectors.dim
    config = EncoderConfig(dim=dim, blocks=blocks, heads=heads, hidden=hidden, dropout=dropout, norm_first=norm_first)
    return NextItem(
        item_vectors,
        TransformerEncoder(config),
        history,
        max_length,
        positions=Positions(max_length, dim),
        dropout=dropout,
        normalize=normalize,
        loss=loss,
    )
