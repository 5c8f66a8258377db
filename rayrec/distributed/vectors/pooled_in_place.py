"""output_dist of pooled vectors between CPU ranks of one host: no message is copied, neither to be packed nor to be put
in order.

A rank's vectors are read where it wrote them, column by column into the result, or added to it; a gradient's columns
are written where their owner reads them. Row partials so need no memory of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from rayrec._runtime.numba_loops import loops
from rayrec.distributed import comm
from rayrec.distributed.comm.host_link import HostLink
from rayrec.distributed.comm.wire import FP32, Codec
from rayrec.distributed.vectors.columns import ColumnMap, Run

_ELEMENT_BYTES = 4
_LOOPS = "rayrec.distributed.vectors.place_loops"


class InPlaceColumns:
    """Which columns of the result each rank has, for the compiled loops.

    Args:
        columns: which of the result's columns each rank has.
        group: joins the ranks.
        codec: number formats on the wire.
        device: where vectors lie.
    """

    def __init__(self, columns: ColumnMap, group: comm.Group, codec: Codec, device: torch.device) -> None:
        self.width, self.widths, self._group = columns.width, columns.widths, group
        self._wanted = (
            device.type == "cpu"
            and group is not None
            and group.size() > 1
            and codec.forward is codec.backward is FP32
            and codec.forward_scale == codec.backward_scale == 1
        )
        covered = np.zeros(columns.width, bool)
        self.runs = [np.array(list(_marked(runs, covered)), np.uint64).reshape(-1, 4) for runs in columns.runs]
        self.complete = bool(covered.all())

    @cached_property
    def link(self) -> HostLink | None:
        """Joins the ranks; None where they are on several hosts or send other number formats. Collective at its first
        use."""
        if not self._wanted:
            return None
        assert self._group is not None
        return comm.link_of(self._group, torch.empty(0))


def _marked(runs: Sequence[Run], covered: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """A rank's runs, cut where `covered` changes, which then covers them too."""
    for run in runs:
        seen = covered[run.dst_col : run.dst_col + run.width].copy()
        edges = [0, *(np.flatnonzero(seen[1:] != seen[:-1]) + 1).tolist(), run.width]
        for first, end in zip(edges, edges[1:], strict=False):
            yield run.src_col + first, run.dst_col + first, end - first, int(seen[first])
        covered[run.dst_col : run.dst_col + run.width] = True


class InPlaceTrip:
    """See `RoundTrip`.

    Args:
        columns: of the result.
        link: joins the ranks.
        batch_sizes: examples of each rank.
        scaled: multiplies rows of the result by the factors that make means; None if there are none.
    """

    def __init__(
        self,
        columns: InPlaceColumns,
        link: HostLink,
        batch_sizes: Sequence[int],
        scaled: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._columns, self._link, self._rank, self._scaled = columns, link, link.rank, scaled
        self._batch, self._rows = batch_sizes[link.rank], sum(batch_sizes)
        row_bytes = columns.widths[link.rank] * _ELEMENT_BYTES
        self._firsts = list(accumulate(batch_sizes[:-1], initial=0))
        self._starts = [first * row_bytes for first in self._firsts]
        # bytes for, and from, each rank on the way forward
        self._sent = [size * row_bytes for size in batch_sizes]
        self._received = [self._batch * width * _ELEMENT_BYTES for width in columns.widths]

    def _own_rows(self, of_all: torch.Tensor) -> np.ndarray:
        first = self._firsts[self._rank]
        return of_all[first : first + self._batch].numpy()

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        vectors = parts[0].detach().float().contiguous()
        self._result = (torch.empty if self._columns.complete else torch.zeros)(self._batch, self._columns.width)
        self._parts = _Parts(self._columns, self._rank, self._own_rows(vectors), self._result.numpy())
        source, starts, sizes = vectors.data_ptr(), self._starts, self._sent

        def write(rank: int, address: int) -> None:
            ctypes.memmove(address, source + starts[rank], sizes[rank])

        self._wait = comm.exchange_in_place(self._link, sizes, write, self._received, self._parts.read)

    def receive(self) -> torch.Tensor:
        self._wait()
        self._parts.place_own_before(len(self._sent))
        result = self._result
        del self._result, self._parts, self._wait  # the result's graph holds this trip: no cycle may keep its memory
        return result if self._scaled is None else self._scaled(result)

    def send_gradients(self, grad: torch.Tensor) -> None:
        columns, batch, starts = self._columns, self._batch, self._starts
        grad = grad if self._scaled is None else self._scaled(grad)
        grad_BW, scale = grad.detach().contiguous().numpy(), np.float32(1 / len(self._sent))
        grads = self._grads = torch.empty(self._rows, columns.widths[self._rank])
        loops(_LOOPS).take(grad_BW, columns.runs[self._rank], scale, self._own_rows(grads))

        def write(rank: int, address: int) -> None:
            part_BC = _floats(address, batch, columns.widths[rank])
            loops(_LOOPS).take(grad_BW, columns.runs[rank], scale, part_BC)

        def read(rank: int, address: int, size: int) -> None:
            ctypes.memmove(grads.data_ptr() + starts[rank], address, size)

        self._wait = comm.exchange_in_place(self._link, self._received, write, self._sent, read)

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        self._wait()
        grads = self._grads
        del self._grads, self._wait  # a result that is kept must not keep its gradients
        return [grads.view(shapes[0])]


class _Parts:
    """What ranks have of the result, placed in the order of ranks whoever comes first, so that sums do not vary."""

    def __init__(self, columns: InPlaceColumns, rank: int, own_BC: np.ndarray, result_BW: np.ndarray) -> None:
        self._columns, self._rank, self._own_BC, self._result_BW = columns, rank, own_BC, result_BW
        self._own_placed = False

    def read(self, rank: int, address: int, _: int) -> None:
        self.place_own_before(rank)
        self._place(rank, _floats(address, len(self._result_BW), self._columns.widths[rank]))

    def place_own_before(self, rank: int) -> None:
        if rank > self._rank and not self._own_placed:
            self._own_placed = True
            self._place(self._rank, self._own_BC)

    def _place(self, rank: int, part_BC: np.ndarray) -> None:
        loops(_LOOPS).place(part_BC, self._columns.runs[rank], self._result_BW)


def _floats(address: int, rows: int, width: int) -> np.ndarray:
    """Memory of another rank as `[rows, width]`."""
    memory = (ctypes.c_float * (rows * width)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, width)
