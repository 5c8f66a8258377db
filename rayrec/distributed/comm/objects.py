"""Collectives of Python objects, and barriers: for set-up, not for a step.

An object that cannot be pickled, or that some rank cannot unpickle, raises on every rank. An error inside an object
that does not survive pickling arrives as a RuntimeError with its type and text.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from rayrec.distributed.comm.collectives import Group, alone, count, tree_of

T = TypeVar("T")


def broadcast_object(obj: T, group: Group, src: int = 0) -> T:
    """Returns the object of group rank `src` on every rank.

    Raises (on every rank):
        TypeError: the object cannot be pickled, or some rank cannot unpickle it.
    """
    if alone(group):
        return obj
    assert group is not None
    count("broadcast_object")
    is_src = group.rank() == src
    box: list[Any] = [_pack(obj) if is_src else None]
    dist.broadcast_object_list(box, group=group, group_src=src)
    (received,) = _unpack({src: box[0]}, group, skip=src if is_src else None)
    return obj if is_src else received


def all_gather_object(obj: T, group: Group) -> list[T]:
    """Every rank's object, in rank order.

    Raises (on every rank):
        TypeError: an object cannot be pickled, or some rank cannot unpickle it.
    """
    if alone(group):
        return [obj]
    assert group is not None
    count("all_gather_object")
    return _unpack(dict(enumerate(_gather(_pack(obj), group))), group)


def gather_object(obj: T, group: Group) -> list[T] | None:
    """Every rank's object, in rank order, on group rank 0; None on the others."""
    if alone(group):
        return [obj]
    assert group is not None
    count("gather_object")
    objects: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(obj, objects, group=group, group_dst=0)
    return objects


def scatter_object(objects: list[T] | None, group: Group) -> T:
    """Returns on each rank its object of the list of group rank 0."""
    if alone(group):
        assert objects is not None
        return objects[0]
    count("scatter_object")
    box: list[Any] = [None]
    dist.scatter_object_list(box, objects, group=group, group_src=0)
    return box[0]


def combine_objects(obj: T, group: Group, merge: Callable[[T, T], T]) -> T:
    """Merges a picklable object of each rank to one, which every rank returns.

    As in `combine`, O(log W) messages follow one another, where the gathers of objects send around a ring of W ranks.

    Args:
        merge: From two objects, of consecutive ranks, to one; associative.

    Raises (on every rank):
        Exception: `merge` failed on some rank.
        TypeError: an object cannot be pickled.
    """
    if group is None or group.size() == 1:
        return obj
    count("combine_objects")
    children, parent = tree_of(group)
    answer: _Answer = (obj, None)
    for child in children:
        answer = _merge(answer, pickle.loads(_receive(group, child)), merge)
    packed = _pack(answer)
    if packed.problem is not None:
        packed = _pack((None, TypeError(f"rank {group.rank()}: {packed.problem}")))
    if parent is not None:
        _send(packed.data, group, parent)
    merged: T
    merged, failed = pickle.loads(_broadcast(packed.data, group))
    if failed is not None:
        raise failed
    return merged


_Answer = tuple[Any, Exception | None]  # an object, or why there is none


def _merge(mine: _Answer, other: _Answer, merge: Callable[[Any, Any], Any]) -> _Answer:
    failed = next((error for _, error in (mine, other) if error is not None), None)
    if failed is not None:
        return None, failed
    try:
        return merge(mine[0], other[0]), None
    except Exception as error:
        return None, error


def _send(data: bytes, group: dist.ProcessGroup, dst: int) -> None:
    dist.send(torch.tensor([len(data)]), group=group, group_dst=dst)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=group, group_dst=dst)


def _receive(group: dist.ProcessGroup, src: int) -> bytes:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=src)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=src)
    return data.numpy().tobytes()


def _broadcast(data: bytes, group: dist.ProcessGroup) -> bytes:
    """The data of group rank 0."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    sent = torch.empty(int(size), dtype=torch.uint8)
    if group.rank() == 0:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(sent, group=group, group_src=0)
    return sent.numpy().tobytes()


def call_on_rank(group: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls `func` on rank `rank`. Every rank returns its result, or raises its error."""
    answer: tuple[T | None, Exception | None] = (None, None)
    if group.rank() == rank:
        try:
            answer = (func(*args, **kwargs), None)
        except Exception as error:  # other ranks wait for the answer
            answer = (None, error)
    result, failed = broadcast_object(answer, group, rank)
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]


class _Packed(NamedTuple):
    """A pickled object, or why it cannot be pickled. `plain`: it has built-in types only, so that every rank can
    unpickle it."""

    data: bytes
    problem: str | None
    plain: bool


class _Pickler(pickle.Pickler):
    """Pickles errors with their text, and notes whether there are objects other than those of built-in types."""

    plain = True

    def reducer_override(self, obj: Any) -> Any:  # not called for numbers, texts, lists, tuples, dicts and sets
        self.plain = False
        if not isinstance(obj, BaseException):
            return NotImplemented
        text = _text(obj)
        try:
            data = pickle.dumps(obj)
            survives = _text(pickle.loads(data)) == text
        except Exception:
            survives = False
        return (_error, (data, text)) if survives else (RuntimeError, (text,))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _error(data: bytes, text: str) -> BaseException:
    try:
        error: BaseException = pickle.loads(data)
    except Exception:  # for example, its class is defined on the sending rank only
        return RuntimeError(text)
    return error


def _pack(obj: object) -> _Packed:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(obj)
    except Exception as error:
        return _Packed(b"", f"the {type(obj).__name__} cannot be pickled: {_text(error)}", plain=True)
    return _Packed(buffer.getvalue(), None, pickler.plain)


def _unpack(packed: dict[int, _Packed], group: dist.ProcessGroup, skip: int | None = None) -> list[Any]:
    """The objects, by sending rank. All ranks have the same `packed`.

    Args:
        skip: rank whose object is not unpickled, and None in the result.
    """
    problems = [f"rank {rank}: {item.problem}" for rank, item in packed.items() if item.problem is not None]
    objects: list[Any] = []
    if not problems:
        problem = None
        for rank, item in packed.items():
            try:
                objects.append(None if rank == skip else pickle.loads(item.data))
            except Exception as error:
                problem = f"rank {group.rank()}: the object of rank {rank} cannot be unpickled: {_text(error)}"
                break
        if not all(item.plain for item in packed.values()):
            problems = [each for each in _gather(problem, group) if each is not None]
    if problems:
        raise TypeError("; ".join(problems))
    return objects


def _gather(obj: T, group: dist.ProcessGroup) -> list[T]:
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def barrier(group: Group) -> None:
    """Returns when every rank has called it."""
    if not alone(group):
        count("barrier")
        dist.barrier(group=group)
