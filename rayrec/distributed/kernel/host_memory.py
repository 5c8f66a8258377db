"""The memory of tables on a CPU, and fbgemm's TBEs over it.

fbgemm's Python class makes memory of its own and wants widths that are multiples of 4; its CPU kernels need neither. So
a TBE is made small, and then told where the tables lie: several may share them, in any stacking, and widths are true.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from rayrec.distributed.kernel.tables import LocalTable

STATES = ("momentum1", "momentum2")  # fbgemm's names for what a rule names as it likes


class HostMemory:
    """Tables one below the other, and their optimizer states likewise.

    Args:
        tables: of one dtype and optimizer.
    """

    def __init__(self, tables: Sequence[LocalTable]) -> None:
        self._tables = list(tables)
        self._rule = tables[0].update.rule
        self.weights = torch.zeros(sum(self._elements()), dtype=tables[0].config.data_type.dtype)
        self.states = {
            name: torch.zeros(sum(self._rows() if per_row else self._elements()))
            for name, per_row in self._rule.rowwise.items()
        }

    def tables_weights(self) -> list[torch.Tensor]:
        """Each table's `[rows, cols]`, as views."""
        parts = self.weights.split(self._elements())
        return [part.view(table.rows.size, table.cols.size) for table, part in zip(self._tables, parts, strict=True)]

    def tables_states(self) -> list[dict[str, torch.Tensor]]:
        """Each table's states by the rule's names, as views."""
        out: list[dict[str, torch.Tensor]] = [{} for _ in self._tables]
        for name, per_row in self._rule.rowwise.items():
            parts = self.states[name].split(self._rows() if per_row else self._elements())
            for table, of_table, part in zip(self._tables, out, parts, strict=True):
                of_table[name] = part if per_row else part.view(table.rows.size, table.cols.size)
        return out

    def start_of(self, number: int) -> tuple[int, int]:
        """The first row, and the first element, of a table."""
        return sum(self._rows()[:number]), sum(self._elements()[:number])

    def _rows(self) -> list[int]:
        return [table.rows.size for table in self._tables]

    def _elements(self) -> list[int]:
        return [table.rows.size * table.cols.size for table in self._tables]


def small_specs(tables: Sequence[LocalTable]) -> list[tuple[int, int, EmbeddingLocation, ComputeDevice]]:
    """What a TBE is made of that `settle` then moves to the tables' memory."""
    return [(1, -(-table.cols.size // 4) * 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for table in tables]


def settle(
    tbe: SplitTableBatchedEmbeddingBagsCodegen,
    tables: Sequence[LocalTable],
    table_of_lookup: Sequence[int],
    memory: HostMemory,
    first: int = 0,
) -> None:
    """Moves a TBE of `small_specs(tables)` to where the tables lie, one after the other, from table `first` on."""
    row, element = memory.start_of(first)
    rows = [table.rows.size for table in tables]
    dims = [table.cols.size for table in tables]
    elements = [row * dim for row, dim in zip(rows, dims, strict=True)]
    first_rows, first_elements = list(accumulate(rows, initial=0)), list(accumulate(elements, initial=element))
    tbe.embedding_specs = [(n, dim, *spec[2:]) for n, dim, spec in zip(rows, dims, tbe.embedding_specs, strict=True)]
    tbe.total_D, tbe.max_D = sum(dims[table] for table in table_of_lookup), max(dims)
    _fill(tbe.D_offsets, accumulate((dims[table] for table in table_of_lookup), initial=0))
    tbe.total_hash_size, tbe.total_hash_size_bits = sum(rows), sum(rows).bit_length()
    _fill(tbe.hash_size_cumsum, [*(first_rows[table] for table in table_of_lookup), sum(rows)])
    _fill(tbe.rows_per_table, (rows[table] for table in table_of_lookup))
    tbe.weights_host = nn.Parameter(memory.weights)
    _fill(tbe.weights_offsets, (first_elements[table] for table in table_of_lookup))
    for name, (state, per_row) in zip(STATES, tables[0].update.rule.rowwise.items(), strict=False):
        starts = [row + start for start in first_rows] if per_row else first_elements
        setattr(tbe, f"{name}_host", nn.Parameter(memory.states[state]))
        _fill(getattr(tbe, f"{name}_offsets"), (starts[table] for table in table_of_lookup))


def _fill(target: torch.Tensor, numbers: Iterable[int]) -> None:
    target.copy_(torch.tensor(list(numbers), dtype=target.dtype))
