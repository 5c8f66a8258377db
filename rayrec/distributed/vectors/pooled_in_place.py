"""output_dist of pooled vectors between CPU ranks of one host, in shared memory: no message is packed or reordered.

A rank's vectors are read where it wrote them, column by column into the result, or added to it; a gradient's columns
are written where their owner reads them. Row partials need no memory of their own.
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
_LOOPS = "rayrec.distributed.vectors.column_loops"


class InPlaceColumns:
    """The result's columns that each rank has, for the compiled loops.

    Args:
        columns: the result's columns that each rank has.
        group: group of the ranks.
        codec: number formats on the wire.
        device: device of the vectors.
    """

    def __init__(self, columns: ColumnMap, group: comm.Group, codec: Codec, device: torch.device) -> None:
        self.width, self.widths, self._group = columns.width, columns.widths, group
        self._linkable = (
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
        """The shared memory of the ranks; None if they are on several hosts or send other number formats. The first
        use is a collective."""
        if not self._linkable:
            return None
        assert self._group is not None
        return comm.link_of(self._group, torch.empty(0))


def _marked(runs: Sequence[Run], covered: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """A rank's runs, cut wherever `covered` changes; marks their columns in `covered`."""
    for run in runs:
        seen = covered[run.dst_col : run.dst_col + run.width].copy()
        edges = [0, *(np.flatnonzero(seen[1:] != seen[:-1]) + 1).tolist(), run.width]
        for start, stop in zip(edges, edges[1:], strict=False):
            yield run.src_col + start, run.dst_col + start, stop - start, int(seen[start])
        covered[run.dst_col : run.dst_col + run.width] = True


class InPlaceTrip:
    """A `RoundTrip` in shared memory.

    Args:
        columns: columns of the result.
        link: shared memory of the ranks.
        batch_sizes: examples of each rank.
        scaled: multiplies rows of the result by factors that turn sums into means; None without factors.
    """

    def __init__(
        self,
        columns: InPlaceColumns,
        link: HostLink,
        batch_sizes: Sequence[int],
        scaled: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._columns, self._link, self._rank, self._scaled = columns, link, link.rank, scaled
        self._batch, self._num_rows = batch_sizes[link.rank], sum(batch_sizes)
        self._scatter, self._gather = loops(_LOOPS).scatter, loops(_LOOPS).gather
        row_bytes = columns.widths[link.rank] * _ELEMENT_BYTES
        firsts = list(accumulate(batch_sizes[:-1], initial=0))
        self._own = slice(firsts[link.rank], firsts[link.rank] + self._batch)
        self._starts = [first * row_bytes for first in firsts]
        # Bytes for, and from, each rank on the way forward.
        self._sent = [size * row_bytes for size in batch_sizes]
        self._received = [self._batch * width * _ELEMENT_BYTES for width in columns.widths]

    def send(self, vectors: Sequence[torch.Tensor]) -> None:
        self._vectors = vectors[0].detach().float().contiguous()
        self._result = (torch.empty if self._columns.complete else torch.zeros)(self._batch, self._columns.width)
        self._own_added = False
        self._wait = comm.exchange_in_place(
            self._link, self._sent, self._write_vectors, self._received, self._read_vectors
        )

    def _write_vectors(self, rank: int, address: int) -> None:
        ctypes.memmove(address, self._vectors.data_ptr() + self._starts[rank], self._sent[rank])

    def _read_vectors(self, rank: int, address: int, _: int) -> None:
        self._add_own(before=rank)
        rank_BC = _floats(address, self._batch, self._columns.widths[rank])
        self._scatter(rank_BC, self._columns.runs[rank], self._result.numpy())

    def _add_own(self, before: int) -> None:
        """Adds this rank's columns when its turn comes: sums are always in the order of ranks."""
        if self._rank < before and not self._own_added:
            self._own_added = True
            own_BC = self._vectors[self._own].numpy()
            self._scatter(own_BC, self._columns.runs[self._rank], self._result.numpy())

    def receive(self) -> torch.Tensor:
        self._wait()
        self._add_own(before=len(self._sent))
        result = self._result
        del self._result, self._vectors, self._wait  # the result's graph holds this trip: a cycle would keep its memory
        return result if self._scaled is None else self._scaled(result)

    def send_gradients(self, grad: torch.Tensor) -> None:
        grad = grad if self._scaled is None else self._scaled(grad)
        self._grad_BW, self._share = grad.detach().contiguous().numpy(), np.float32(1 / len(self._sent))
        self._grads = torch.empty(self._num_rows, self._columns.widths[self._rank])
        self._gather(self._grad_BW, self._columns.runs[self._rank], self._share, self._grads[self._own].numpy())
        self._wait = comm.exchange_in_place(
            self._link, self._received, self._write_gradients, self._sent, self._read_gradients
        )

    def _write_gradients(self, rank: int, address: int) -> None:
        rank_BC = _floats(address, self._batch, self._columns.widths[rank])
        self._gather(self._grad_BW, self._columns.runs[rank], self._share, rank_BC)

    def _read_gradients(self, rank: int, address: int, size: int) -> None:
        ctypes.memmove(self._grads.data_ptr() + self._starts[rank], address, size)

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        self._wait()
        grads = self._grads
        del self._grads, self._grad_BW, self._wait  # a result that the user keeps must not keep its gradients
        return [grads.view(shapes[0])]


def _floats(address: int, rows: int, width: int) -> np.ndarray:
    """Another rank's memory as `[rows, width]`."""
    return np.asarray(_Memory(address, rows, width))


class _Memory:
    """Float32 numbers at an address, for numpy. ctypes would make a new type for every size, in 0.1 ms."""

    def __init__(self, address: int, rows: int, width: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (rows, width), "typestr": "<f4", "version": 3}
