"""Work on many files at once: on Ray where it runs, else in threads of this process."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayrec.storage.errors import DataError

A = TypeVar("A")
T = TypeVar("T")

_THREADS = 16
_CPUS = 0.25  # of a task: it waits for storage more than it computes


def each(function: Callable[[A], T], inputs: Iterable[A]) -> Iterator[T]:
    """The results, in the order of the inputs, of which a few are taken ahead.

    Raises:
        DataError: what the function raised, wherever it ran.
    """
    return in_tasks(function, inputs) if _ray_has_room() else in_threads(function, inputs)


def one_by_one(function: Callable[[A], T], inputs: Iterable[A], *, on_ray: bool) -> Iterator[T]:
    """As `each`, for work that keeps a CPU busy: in this process, or `on_ray` in a task with a CPU an input."""
    if not on_ray:
        return map(function, inputs)
    start_ray()
    return in_tasks(function, inputs, cpus=1.0)


def start_ray() -> None:
    """Connects the Ray that RAY_ADDRESS names, or starts a local one, unless one is connected.

    Without an address Ray would look for the one that this machine started last, which may have died.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS") or "local"
    ray.init(address=address, ignore_reinit_error=True, logging_level=logging.ERROR)


def several_nodes() -> bool:
    """Whether a Ray is connected whose tasks may run on other machines."""
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized()) and sum(node["Alive"] for node in ray.nodes()) > 1


def in_threads(function: Callable[[A], T], inputs: Iterable[A], threads: int = _THREADS) -> Iterator[T]:
    """As `each`, in threads of this process."""
    with ThreadPoolExecutor(threads) as pool:
        yield from _ahead(lambda item: pool.submit(function, item).result, inputs, 2 * threads)


def in_tasks(
    function: Callable[[A], T], inputs: Iterable[A], cpus: float = _CPUS, at_once: int | None = None
) -> Iterator[T]:
    """As `each`, in tasks of the Ray that is connected.

    Args:
        cpus: of a task.
        at_once: tasks; None: twice what the cluster has room for.
    """
    import ray

    task: Any = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(_call)
    work = ray.put(function)

    def begin(item: A) -> Callable[[], T]:
        ref = task.remote(work, item)
        return lambda: answer(ref)

    return _ahead(begin, inputs, at_once or max(2, int(2 * ray.cluster_resources().get("CPU", 1.0) / cpus)))


def _ahead(begin: Callable[[A], Callable[[], T]], inputs: Iterable[A], at_once: int) -> Iterator[T]:
    waiting: deque[Callable[[], T]] = deque()
    for item in inputs:
        waiting.append(begin(item))
        if len(waiting) >= at_once:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _ray_has_room() -> bool:
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized()) and ray.available_resources().get("CPU", 0.0) >= _CPUS


def answer(ref: Any, timeout_s: float | None = None) -> Any:
    """What a task or a call of an actor gives; raises its DataError as it is."""
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError):
            raise error.cause from None
        raise


def actor_here(kind: type, *given: Any) -> Any:
    """An actor on this process's own node, as no other node's end takes it away; Ray makes another where its process
    ends."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made: Any = ray.remote(num_cpus=0)(kind)
    return made.options(max_restarts=-1, max_task_retries=-1, scheduling_strategy=here).remote(*given)


def _call(function: Callable[[A], T], item: A) -> T:
    return function(item)  # Ray wants a plain function, ours may be a partial one
