"""How the sparse types print."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Lists = Sequence[torch.Tensor]


def jagged_text(values: Lists, weights: Lists | None, indent: str) -> str:
    """The lists of one feature as text; with weights, as the inner part of a dict of values and weights."""
    text = str([v.tolist() for v in values])
    if weights is None:
        return text
    return f'"values": {text},\n{indent}"weights": {[w.tolist() for w in weights]}'


def keyed_text(features: Sequence[tuple[str, Lists, Lists | None]]) -> str:
    """The lists of every feature, given as (key, values, weights)."""
    if not features:
        return "KeyedJaggedTensor()\n"
    return "KeyedJaggedTensor({\n" + ",\n".join(_feature_text(*feature) for feature in features) + "\n})\n"


def _feature_text(key: str, values: Lists, weights: Lists | None) -> str:
    text = jagged_text(values, weights, indent=" " * 8)
    return f'    "{key}": {text}' if weights is None else f'    "{key}": {{\n        {text}\n    }}'
