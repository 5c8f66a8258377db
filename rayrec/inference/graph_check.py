"""Whether a model's function may be given a context once for all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rayrec.inference.graph import Scoring, arguments
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor

_ROWS, _IDS = 3, 2  # rows that are tried, ids in each bag


def same_with_context(scoring: Scoring, plain: Scoring, tables: torch.Tensor, rows_of: Mapping[str, int]) -> bool:
    """Whether rows score the same, bit by bit, with a context and with its bags in every row.

    Args:
        scoring, plain: the function with a row that all share, and without.
        rows_of: feature -> rows of its table.
    """
    inputs, drawn = scoring.inputs, torch.Generator().manual_seed(0)
    shared = list(inputs.context or ())
    sizes = {key: (1 if key in shared else _ROWS, _IDS) for key in inputs.keys}
    ids = {key: torch.randint(rows_of[key], size, generator=drawn) for key, size in sizes.items()}
    weights = {key: torch.rand(size, generator=drawn) for key, size in sizes.items()}

    def batch_of(keys: Sequence[str], rows: int) -> Batch:
        def of(parts: Mapping[str, torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
            return torch.cat([empty, *(parts[key].expand(rows, _IDS).reshape(-1) for key in keys)])

        values = of(ids, torch.empty(0, dtype=torch.int64))
        lengths = torch.full((len(keys) * rows,), _IDS)
        given = of(weights, torch.empty(0)) if inputs.weighted else None
        sparse = KeyedJaggedTensor(list(keys), values, given, lengths=lengths, stride=rows)
        return Batch(dense[:rows], sparse, torch.zeros(rows))

    dense = torch.randn(_ROWS, inputs.num_dense, generator=drawn)
    rest = batch_of([key for key in inputs.keys if key not in shared], _ROWS)
    context = batch_of(shared, 1).sparse
    try:
        with torch.no_grad():
            found = scoring(*arguments(rest, inputs, tables, context))
            expected = plain(*arguments(batch_of(inputs.keys, _ROWS), plain.inputs, tables))
    except (RuntimeError, ValueError, IndexError):
        return False  # the model looks at the ids itself
    return torch.equal(found, expected)
