"""Plans which rank writes which rectangle of a checkpoint. The plan is made at the first save and kept for later ones.

Ranks plan anew, together, as soon as the rectangles of any of them differ from those of its last save: a table has
grown, or an optimizer has allocated its state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.writer import Item
from rayrec.distributed import comm


class Region(NamedTuple):
    """A rectangle of a tensor that a rank can write.

    Args:
        key: key of the tensor.
        size: shape of the full tensor.
        offsets, shape: offsets and shape of the rectangle, one number per dimension.
        itemsize: bytes of a number.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Work:
    """The tensors that a rank writes.

    Args:
        keys: keys of all ranks' tensors; empty except on rank 0.
    """

    items: list[Item]
    keys: frozenset[str]


def items_of(state: dict[str, Rectangles]) -> list[Item]:
    """The rectangles of this rank's state, cut to the size in which they are written."""
    return [
        Item(key, tuple(rectangles.shape), tuple(rectangle.offsets), rectangle.tensor)
        for key, rectangles in state.items()
        for rectangle in rectangles.to_save().rectangles
    ]


class SavePlan:
    """The plan of this rank's saves: which of its rectangles it writes, because other ranks may have the same ones."""

    def __init__(self) -> None:
        self._regions: list[Region] | None = None
        self._chosen: list[int] = []
        self._keys: frozenset[str] = frozenset()

    def fits(self, items: Sequence[Item]) -> bool:
        """Whether the plan was made for rectangles like these."""
        return self._regions == regions_of(items)

    def renew(self, items: Sequence[Item], group: comm.Group) -> None:
        """Plan for these rectangles. A collective; call it on every rank if the plan does not fit on some.

        Raises:
            ValueError: on every rank, if the rectangles of all ranks do not cover whole tensors.
        """
        # Without a plan until all ranks have the new one. Otherwise, after an error, ranks could keep different plans.
        self._regions, regions = None, regions_of(items)
        by_rank = comm.gather_object(regions, group)
        answers: list[list[int] | ValueError] | None = None
        keys: frozenset[str] = frozenset()
        if by_rank is not None:
            try:
                answers = list(divide(by_rank))
                keys = frozenset(region.key for own in by_rank for region in own)
            except ValueError as error:
                answers = [error] * len(by_rank)
        answer = comm.scatter_object(answers, group)
        if isinstance(answer, ValueError):
            raise answer
        self._regions, self._chosen, self._keys = regions, answer, keys

    def work(self, items: Sequence[Item]) -> Work:
        """What this rank writes, of rectangles that the plan fits."""
        return Work([items[position] for position in self._chosen], self._keys)


def regions_of(items: Sequence[Item]) -> list[Region]:
    """The rectangles, without their tensors."""
    return [
        Region(item.key, item.size, item.offsets, tuple(item.tensor.shape), item.tensor.element_size())
        for item in items
    ]


def divide(by_rank: Sequence[Sequence[Region]]) -> list[list[int]]:
    """For each rank, the positions of those of its regions that it writes.

    A region that several ranks have is written by one of them, so that ranks write about equally many bytes.

    Raises:
        ValueError: the regions do not fill a tensor, or overlap.
    """
    owners: dict[Region, list[tuple[int, int]]] = defaultdict(list)  # (rank, position)
    for rank, regions in enumerate(by_rank):
        for position, region in enumerate(regions):
            owners[region].append((rank, position))
    _check(owners)
    loads = [0] * len(by_rank)
    chosen: list[list[int]] = [[] for _ in by_rank]
    # Regions with one owner first: the others then even out the loads, the largest ones first.
    for region, places in sorted(owners.items(), key=lambda entry: (len(entry[1]) > 1, -entry[0].nbytes)):
        rank, position = min(places, key=lambda place: loads[place[0]])
        loads[rank] += region.nbytes
        chosen[rank].append(position)
    return [sorted(positions) for positions in chosen]


def _check(regions: Iterable[Region]) -> None:
    by_key: dict[str, list[Region]] = defaultdict(list)
    for region in regions:
        by_key[region.key].append(region)
    for key, parts in by_key.items():
        sizes = {part.size for part in parts}
        if len(sizes) > 1:
            raise ValueError(f"{key}: ranks have tensors of different shapes: {', '.join(map(str, sorted(sizes)))}")
        (size,) = sizes
        for part in parts:
            if any(o + n > total for o, n, total in zip(part.offsets, part.shape, size, strict=True)):
                raise ValueError(f"{key}: a rectangle at {part.offsets} of shape {part.shape} is outside of {size}")
        filled = sum(math.prod(part.shape) for part in parts)
        if filled != math.prod(size) or len({part.offsets for part in parts}) != len(parts):
            raise ValueError(f"{key}: the rectangles of all ranks have {filled:,} of {math.prod(size):,} numbers")
