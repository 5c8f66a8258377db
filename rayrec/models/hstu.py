"""HSTU as a next-item model (Zhai et al. 2024, arXiv:2402.17152)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.models.next_item import NextItem
from rayrec.models.retriever import HistoryOf, ItemVectors
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
from rayrec.modules.positions import Positions


def hstu(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    history: str,
    times: str | None = None,
    max_length: int = 50,
    blocks: int = 2,
    heads: int = 1,
    qk_dim: int | None = None,
    v_dim: int | None = None,
    dropout: float = 0.2,
    normalize: bool = True,
    loss: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    tables_device: torch.device | str | None = "meta",
    seed: int | None = None,
) -> NextItem:
    """A next-item model with layers of HSTU.

    Args:
        tables: one of them reads `history`; its rows are the items, its width is the encoder's.
        num_dense: not read.
        history: the feature, a list of items, oldest first.
        times: of its items, as `sequence.name` of the schema; with them attention has a bias by time.
        max_length, blocks, heads, qk_dim, v_dim, dropout: of the encoder; see `HSTUConfig`.
        device, tables_device, seed: as of the other models.
        normalize, loss: see `NextItem`; by default scores are cosines over a temperature of 0.05.
    """
    item_vectors = ItemVectors(tables, history, tables_device, seed)
    dim = item_vectors.dim
    config = HSTUConfig(
        dim=dim,
        max_length=max_length,
        blocks=blocks,
        heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        use_times=times is not None,
        dropout=dropout,
    )
    with torch.device(device or "cpu"):
        return NextItem(
            item_vectors,
            HSTUEncoder(config),
            HistoryOf(history, times),
            max_length,
            positions=Positions(max_length, dim, count_from="oldest"),
            dropout=dropout,
            normalize=normalize,
            loss={"temperature": 0.05 if normalize else 1.0, **(loss or {})},
        )
