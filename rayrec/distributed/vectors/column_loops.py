"""Compiled loops that copy columns between ranks' vectors and a result. Import through `numba_loops.loops`.

Shapes: B examples, C columns of a rank, W columns of the result. A run is (first column of the rank, first column of
the result, number of columns, whether an earlier rank has columns of this run).
"""

from __future__ import annotations

from typing import Any

import numba as nb

from rayrec._runtime.numba_loops import compiled

_TYPES = {"rank_BC": "float32[:,::1]", "runs": "uint64[:,::1]", "result_BW": "float32[:,::1]", "scale": "float32"}


@compiled(_TYPES)
def scatter(rank_BC: Any, runs: Any, result_BW: Any) -> None:
    """Writes a rank's columns into the result, or adds them to the same columns of earlier ranks."""
    for example in range(nb.uint64(rank_BC.shape[0])):
        for run in range(nb.uint64(runs.shape[0])):
            source, target, width = runs[run, 0], runs[run, 1], runs[run, 2]
            if runs[run, 3] > 0:
                for column in range(width):
                    result_BW[example, target + column] += rank_BC[example, source + column]
            else:
                for column in range(width):
                    result_BW[example, target + column] = rank_BC[example, source + column]


@compiled(_TYPES)
def gather(result_BW: Any, runs: Any, scale: Any, rank_BC: Any) -> None:
    """Reads a rank's columns from the result, times `scale`."""
    for example in range(nb.uint64(rank_BC.shape[0])):
        for run in range(nb.uint64(runs.shape[0])):
            source, target, width = runs[run, 0], runs[run, 1], runs[run, 2]
            for column in range(width):
                rank_BC[example, source + column] = result_BW[example, target + column] * scale
