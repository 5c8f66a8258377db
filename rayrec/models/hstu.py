"""HSTU as a next-item model (Zhai et al. 2024, arXiv:2402.17152)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayrec.models.batch import Batch
from rayrec.models.next_item import NextItem
from rayrec.models.retriever import History, ItemVectors
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
from rayrec.modules.positions import Positions


def make_hstu(
    item_vectors: ItemVectors,
    history: Callable[[Batch], History],
    *,
    max_length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    qk_dim: int | None = None,
    v_dim: int | None = None,
    use_times: bool = False,
    dropout: float = 0.2,
    normalize: bool = True,
    loss: dict[str, Any] | None = None,
) -> NextItem:
    """A next-item model with layers of HSTU.

    Args:
        item_vectors: the item table; its width is the encoder's.
        history: a batch's histories, with times if `use_times`.
        max_length, blocks, heads, qk_dim, v_dim, use_times, dropout: of the encoder; see `HSTUConfig`.
        normalize, loss: see `NextItem`; by default scores are cosines over a temperature of 0.05.
    """
    dim = item_vectors.dim
    config = HSTUConfig(
        dim=dim,
        max_length=max_length,
        blocks=blocks,
        heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        use_times=use_times,
        dropout=dropout,
    )
    return NextItem(
        item_vectors,
        HSTUEncoder(config),
        history,
        max_length,
        positions=Positions(max_length, dim, count_from="oldest"),
        dropout=dropout,
        normalize=normalize,
        loss={"temperature": 0.05 if normalize else 1.0, **(loss or {})},
    )
