"""How the sparse types print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayrec.sparse.jagged import JaggedTensor
    from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def jagged_text(jt: JaggedTensor, indent: str) -> str:
    """The lists of one feature as text; with weights, as an object of values and weights without its braces."""
    values = str([v.tolist() for v in jt.to_dense()])
    weights = jt.to_dense_weights()
    if weights is None:
        return values
    return f'"values": {values},\n{indent}"weights": {[w.tolist() for w in weights]}'


def keyed_text(kjt: KeyedJaggedTensor) -> str:
    """The lists of every feature."""
    if not kjt.keys():
        return "KeyedJaggedTensor()\n"
    return "KeyedJaggedTensor({\n" + ",\n".join(_feature_text(key, kjt[key]) for key in kjt.keys()) + "\n})\n"


def _feature_text(key: str, jt: JaggedTensor) -> str:
    text = jagged_text(jt, indent=" " * 8)
    return f'    "{key}": {text}' if jt.weights_or_none() is None else f'    "{key}": {{\n        {text}\n    }}'
