"""One table as the planner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayrec.distributed.comm.wire import VECTOR_ELEMENT_BYTES
from rayrec.distributed.planner.tables.row_load import RowLoad

TableKey = tuple[str, str]  # (module path, table name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Sizes and traffic of one table, and how it may be sharded.

    Args:
        ids: ids looked up in one step, all ranks together.
        bags: bags in one step, all ranks together.
        pooled: whether the output is one vector per bag; otherwise one per id.
        state_row_bytes, state_element_bytes: optimizer state per row, and per element of a row.
        kernels: allowed kernels by allowed sharding type, best first.
        runnable: the same without the user's constraints.
        ranks: allowed ranks, ascending.
        row_load: how ids are distributed over the rows; None: evenly.
        sent_bytes, returned_bytes: bytes of one vector element, and of one gradient element, between ranks.
    """

    path: str
    name: str
    rows: int
    dim: int
    element_bytes: int
    num_features: int
    ids: float
    bags: float
    pooled: bool
    weighted: bool
    state_row_bytes: int
    state_element_bytes: int
    kernels: Mapping[str, tuple[str, ...]]
    runnable: Mapping[str, tuple[str, ...]]
    ranks: tuple[int, ...]
    min_partition: int
    cache_load_factor: float | None = None
    row_load: RowLoad | None = None
    sent_bytes: float = VECTOR_ELEMENT_BYTES
    returned_bytes: float = VECTOR_ELEMENT_BYTES

    @property
    def key(self) -> TableKey:
        return (self.path, self.name)

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def share(self, start: int, stop: int) -> float:
        """The share of the ids that are in the rows `[start, stop)`."""
        return (stop - start) / self.rows if self.row_load is None else self.row_load.share(start, stop, self.rows)

    def worst_share(self, block: int) -> float:
        """The highest share of the ids in a block of rows, if the table is cut into blocks of `block` rows."""
        return block / self.rows if self.row_load is None else self.row_load.worst(block, self.rows)

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * self.element_bytes

    @property
    def state_bytes(self) -> int:
        return self.rows * (self.state_row_bytes + self.dim * self.state_element_bytes)
