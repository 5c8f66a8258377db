"""Pooled vectors and gradients between CPU ranks of one host: in place they are what messages would bring."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import Codec
from rayrec.distributed.vectors.columns import ColumnMap, Run
from rayrec.distributed.vectors.pooled_exchange import PooledExchange
from tests.distributed.oracle import by_message
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def drawn_columns(random: random.Random, world: int) -> ColumnMap:
    """Blocks that one rank has, that ranks have parts of, or of which all have sums; some overlap only in part."""
    blocks = tuple(4 * random.randint(1, 4) for _ in range(random.randint(1, 4)))
    held: list[list[tuple[int, int]]] = [[] for _ in range(world)]  # first column of the result, width
    start = 0
    for width in blocks:
        kind = random.choice(("whole", "cut", "sums", "overlap"))
        if kind == "whole":
            held[random.randrange(world)].append((start, width))
        elif kind == "cut":
            for first in range(0, width, 4):
                held[random.randrange(world)].append((start + first, 4))
        elif kind == "sums":
            for of_rank in held:
                of_rank.append((start, width))
        else:
            held[0].append((start, width))
            held[-1].append((start + width - 4, 4))
        start += width
    runs = []
    for of_rank in held:
        sources = [sum(width for _, width in of_rank[:number]) for number in range(len(of_rank))]
        runs.append(tuple(Run(src, dst, width) for src, (dst, width) in zip(sources, of_rank, strict=True)))
    return ColumnMap(blocks, tuple(runs))


def round_trip(
    exchange: PooledExchange, vectors: torch.Tensor, sizes: list[int], factors: torch.Tensor | None
) -> list[torch.Tensor]:
    vectors = vectors.clone().requires_grad_()
    out = exchange.start(vectors, sizes, factors)()
    out.backward(torch.arange(out.numel(), dtype=torch.float32).view(out.shape).sin())
    assert vectors.grad is not None
    return [out.detach(), vectors.grad]


def both_ways(group: dist.ProcessGroup, seed: int) -> bool:
    """Whether any batch had a rank without examples."""
    same, own = random.Random(seed), torch.Generator().manual_seed(seed + group.rank())
    empty = False
    for _ in range(12):
        columns = drawn_columns(same, group.size())
        sizes = [same.choice((0, 1, 5, 9)) for _ in range(group.size())]
        empty |= 0 in sizes
        vectors = torch.randn(sum(sizes), columns.widths[group.rank()], generator=own)
        mean = same.random() < 0.5
        factors = torch.rand(sizes[group.rank()], len(columns.blocks), generator=own) if mean else None
        ways = []
        for missing in (False, True):
            exchange = PooledExchange(columns, group, group.rank(), Codec(), CPU)
            with by_message() if missing else nullcontext():
                assert (exchange._in_place.link is None) == missing
                ways.append(round_trip(exchange, vectors, sizes, factors))
        for in_place, expected in zip(*ways, strict=True):
            if factors is None:
                assert torch.equal(in_place, expected)
            else:  # a factor and the share in the mean are multiplied in another order
                torch.testing.assert_close(in_place, expected, rtol=1e-6, atol=1e-7)
    return empty


@pytest.mark.parametrize("world", [2, 3])
def test_in_place_is_what_messages_bring(world: int) -> None:
    assert all(on_ranks(world, both_ways, 7 * world))


def without_cycles(group: dist.ProcessGroup) -> bool:
    """Whether a step's result is freed with its last name."""
    exchange = PooledExchange(ColumnMap((4,), ((Run(0, 0, 4),),) * 2), group, group.rank(), Codec(), CPU)
    gc.collect()
    gc.disable()
    try:
        vectors = torch.ones(2, 4, requires_grad=True)
        out = exchange.start(vectors, [1, 1], None)()
        result = weakref.ref(out)
        out.sum().backward()
        del out
        return result() is None
    finally:
        gc.enable()


def test_no_cycle_keeps_a_result() -> None:
    """Through its graph a result holds its trip. If the trip held the result, its memory would never come back."""
    assert all(on_ranks(2, without_cycles))
