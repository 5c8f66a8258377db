"""Objects and errors that cannot be pickled, or unpickled on some rank, raise on every rank; no rank waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from rayrec.distributed import comm
from tests.ranks import on_ranks

WORLD = 3


class WithLock(ValueError):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArguments(ValueError):
    """Can be pickled, not unpickled: unpickling calls it with one argument."""

    def __init__(self, table: str, rows: int) -> None:
        super().__init__(f"table {table} has {rows} rows")


class Prefixed(ValueError):
    """Unpickling it adds its prefix again."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in the script: {text}")


class Unprintable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def load_on(ranks: list[int]) -> str:
    if dist.get_rank() not in ranks:
        raise ImportError(f"no module on rank {dist.get_rank()}")
    return "loaded"


class OnlyOn:
    """An object that some ranks cannot unpickle."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = list(ranks)

    def __reduce__(self) -> Any:
        return load_on, (self.ranks,)


class KnownTo(ValueError):
    """An error that some ranks cannot unpickle, for example of a class that they do not have."""

    def __reduce__(self) -> Any:
        return _known_to, (self.args,)


def _known_to(args: tuple[Any, ...]) -> KnownTo:
    load_on([1])
    return KnownTo(*args)


def local_error(text: str) -> Exception:
    class Local(ValueError):
        pass

    return Local(text)


ERRORS = {
    "lock": lambda: WithLock("row 7 is bad"),
    "two arguments": lambda: TwoArguments("user", 7),
    "prefixed": lambda: Prefixed("row 7"),
    "local class": lambda: local_error("row 7 is bad"),
    "a value without pickle": lambda: ValueError("row 7 is bad", threading.Lock()),
    "known to one rank": lambda: KnownTo("row 7 is bad"),
    "no text": lambda: Unprintable("row 7"),
    "usual": lambda: ValueError("row 7 is bad"),
    "file": lambda: FileNotFoundError(2, "No such file", "/row/7"),
}
SURVIVE = ("no text", "usual", "file")


def raised(group: dist.ProcessGroup, call: Any) -> tuple[str, str]:
    """Type and text of the error; afterwards the ranks are still in step."""
    with pytest.raises(Exception) as caught:
        call()
    assert comm.all_gather_object(group.rank(), group) == list(range(group.size()))
    return type(caught.value).__name__, str(caught.value) if not isinstance(caught.value, Unprintable) else ""


def fails_on_rank_1(group: dist.ProcessGroup, kind: str) -> tuple[str, str]:
    def fail() -> None:
        raise ERRORS[kind]()

    return raised(group, lambda: comm.call_on_rank(group, 1, fail))


@pytest.mark.parametrize("kind", ERRORS)
def test_every_rank_raises_the_error_of_one(kind: str) -> None:
    name = type(ERRORS[kind]()).__name__
    for rank, (raised_type, text) in enumerate(on_ranks(WORLD, fails_on_rank_1, kind)):
        if rank == 1 or kind in SURVIVE:  # the rank that failed raises its own error
            assert raised_type == name
        else:
            assert raised_type == "RuntimeError" and name in text, (rank, text)
        assert "row" in text or kind == "no text", (rank, text)


def unsendable(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    rank = group.rank()
    return [
        raised(group, lambda: comm.call_on_rank(group, 1, threading.Lock)),
        raised(group, lambda: comm.broadcast_object(threading.Lock() if rank == 2 else None, group, 2)),
        raised(group, lambda: comm.all_gather_object(threading.Lock() if rank else 5, group)),
        raised(group, lambda: comm.combine_objects(threading.Lock() if rank == 2 else 5, group, max)),
        raised(group, lambda: comm.broadcast_object(OnlyOn(0, 1), group)),
        raised(group, lambda: comm.all_gather_object(OnlyOn(0, 2) if rank == 2 else {}, group)),
    ]


def test_objects_that_cannot_be_sent_raise_on_every_rank() -> None:
    first, *others = on_ranks(WORLD, unsendable)
    assert all(other == first for other in others), "all ranks raise the same"
    by_call, broadcast, gathered, combined, unknown, unknown_gathered = (text for _, text in first)
    assert {name for name, _ in first} == {"TypeError"}
    assert "rank 1: the tuple cannot be pickled" in by_call and "rank 2: the lock cannot be pickled" in broadcast
    assert "rank 1: the lock" in gathered and "rank 2: the lock" in gathered and "rank 0" not in gathered
    assert combined.startswith("rank 2: the tuple cannot be pickled")
    assert unknown == "rank 2: the object of rank 0 cannot be unpickled: ImportError: no module on rank 2"
    assert unknown_gathered == "rank 1: the object of rank 2 cannot be unpickled: ImportError: no module on rank 1"


def errors_inside(group: dist.ProcessGroup) -> list[list[str]]:
    mine = (True, WithLock(f"rank {group.rank()}") if group.rank() else None)
    return [str(error) for _, error in comm.all_gather_object(mine, group)]


def test_an_error_inside_an_object_keeps_its_text() -> None:
    expected = ["None", *(f"tests.distributed.test_objects.WithLock: rank {rank}" for rank in (1, 2))]
    assert on_ranks(WORLD, errors_inside) == [expected] * WORLD


def combined(group: dist.ProcessGroup) -> tuple[str, tuple[str, str]]:
    rank = group.rank()
    with comm.count_collectives() as counted:
        joined = comm.combine_objects(f"{rank}", group, lambda one, other: one + other)
    assert counted == {"combine_objects": 1}
    return joined, raised(group, lambda: comm.combine_objects([0, "b", 2, 3, 4][rank], group, max))  # type: ignore[type-var]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_objects_of_all_ranks_are_merged_in_their_order(world_size: int) -> None:
    for joined, (kind, text) in on_ranks(world_size, combined):
        assert joined == "01234"[:world_size]
        assert kind == "TypeError" and "not supported between" in text
