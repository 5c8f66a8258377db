"""Maps the columns that ranks send to columns of the result: between all ranks, or in two tiers by hosts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayrec.distributed.ids.routes import Lookup, Routes
from rayrec.distributed.plan.shards import Span


@dataclass(frozen=True, slots=True)
class Run:
    """Columns that are adjacent both in what a rank sends and in the result."""

    src_col: int
    dst_col: int
    width: int


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The columns of the result that each sender has; columns of several senders are added up.

    Args:
        blocks: widths of the result's blocks, in order.
        runs: runs of each sender, in the order of its columns.
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

    @property
    def same_for_all(self) -> bool:
        """Whether every sender has all columns of the result, in their order."""
        return all(runs == (Run(0, 0, self.width),) for runs in self.runs)


def columns_of(routes: Routes) -> ColumnMap:
    """One tier: every rank sends the columns of its lookups directly to the examples' ranks."""
    return ColumnMap(
        tuple(output.dim for output in routes.outputs), tuple(_joined(route.lookups) for route in routes.ranks)
    )


def inside_host(columns: ColumnMap, ranks: Sequence[int]) -> ColumnMap:
    """First tier: the ranks of a host add up their columns; the result is the host's columns, packed in order."""
    runs = [columns.runs[rank] for rank in ranks]
    packed = _packed(run for rank_runs in runs for run in rank_runs)
    return ColumnMap(
        blocks=(sum(run.width for run in packed),),
        runs=tuple(
            tuple(replace(run, dst_col=_packed_col(packed, run.dst_col)) for run in rank_runs) for rank_runs in runs
        ),
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
    """The union of the runs' columns, ascending, without gaps on the sender's side."""
    packed: list[Run] = []
    for span in union(Span(run.dst_col, run.dst_col + run.width) for run in runs):
        src_col = packed[-1].src_col + packed[-1].width if packed else 0
        packed.append(Run(src_col, span.start, span.size))
    return tuple(packed)


def _packed_col(packed: Sequence[Run], col: int) -> int:
    """The packed column that holds a column of the result."""
    run = packed[bisect_right(packed, col, key=lambda run: run.dst_col) - 1]
    return run.src_col + col - run.dst_col


def union(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans as disjoint spans that do not touch, ascending."""
    out: list[Span] = []
    for span in sorted(spans):
        if out and span.start <= out[-1].stop:
            out[-1] = Span(out[-1].start, max(out[-1].stop, span.stop))
        else:
            out.append(span)
    return out
