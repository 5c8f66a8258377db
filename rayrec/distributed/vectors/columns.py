"""Which columns ranks send and where these lie in the result: from rank to rank, or by way of the hosts they are on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayrec.distributed.ids.routes import Lookup, Routes
from rayrec.distributed.plan.shards import Span


@dataclass(frozen=True, slots=True)
class Run:
    """Columns that lie side by side both in what a rank sends and in the result."""

    src_col: int
    dst_col: int
    width: int


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """What each sender has of the result; columns that several have are added up.

    Args:
        blocks: widths of the result's blocks, side by side.
        runs: of each sender, in the order of its columns.
    """

    blocks: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(self.blocks)

    @property
    def widths(self) -> list[int]:
        """Columns of each sender."""
        return [sum(run.width for run in runs) for runs in self.runs]


def columns_of(routes: Routes) -> ColumnMap:
    """Every rank sends the columns of its lookups straight to the rank that wants them."""
    return ColumnMap(
        tuple(output.dim for output in routes.outputs), tuple(_joined(route.lookups) for route in routes.ranks)
    )


def inside_host(columns: ColumnMap, ranks: Sequence[int]) -> ColumnMap:
    """First tier: the ranks of a host add up what they have; the result is the host's columns, packed in order."""
    runs = [columns.runs[rank] for rank in ranks]
    packed = _packed(run for each in runs for run in each)
    return ColumnMap(
        blocks=(sum(run.width for run in packed),),
        runs=tuple(tuple(replace(run, dst_col=_place(packed, run.dst_col)) for run in each) for each in runs),
    )


def across_hosts(columns: ColumnMap, hosts: Iterable[Sequence[int]]) -> ColumnMap:
    """Second tier: each host sends its packed columns."""
    return ColumnMap(
        columns.blocks, tuple(_packed(run for rank in ranks for run in columns.runs[rank]) for ranks in hosts)
    )


def _joined(lookups: Sequence[Lookup]) -> tuple[Run, ...]:
    runs: list[Run] = []
    src_col = 0
    for lookup in lookups:
        last = runs[-1] if runs else None
        if last and last.dst_col + last.width == lookup.cols.start:
            runs[-1] = replace(last, width=last.width + lookup.cols.size)
        else:
            runs.append(Run(src_col, lookup.cols.start, lookup.cols.size))
        src_col += lookup.cols.size
    return tuple(runs)


def _packed(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The columns that any of the runs has, each once and ascending, without gaps where they are sent from."""
    packed: list[Run] = []
    for span in union(Span(run.dst_col, run.dst_col + run.width) for run in runs):
        src_col = packed[-1].src_col + packed[-1].width if packed else 0
        packed.append(Run(src_col, span.start, span.size))
    return tuple(packed)


def _place(packed: Sequence[Run], col: int) -> int:
    """Where a column of the result lies among the packed ones."""
    run = packed[bisect_right(packed, col, key=lambda run: run.dst_col) - 1]
    return run.src_col + col - run.dst_col


def union(spans: Iterable[Span]) -> list[Span]:
    """The same columns as spans that neither overlap nor touch, ascending."""
    out: list[Span] = []
    for span in sorted(spans):
        if out and span.start <= out[-1].stop:
            out[-1] = Span(out[-1].start, max(out[-1].stop, span.stop))
        else:
            out.append(span)
    return out
