"""The sharders used when none are given."""

from __future__ import annotations

from typing import Any

from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.plan.module_sharder import ModuleSharder


def default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder per kind of collection, with its default optimizer."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
