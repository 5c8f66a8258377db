"""Parallel work on many files: on Ray if it runs, otherwise in threads of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayrec._runtime.local_ray import connect, is_begun, is_connected
from rayrec.storage.errors import DataError

A = TypeVar("A")
T = TypeVar("T")

_THREADS = 16
_CPUS = 0.25  # per task, which mostly waits for storage


def each(function: Callable[[A], T], inputs: Iterable[A]) -> Iterator[T]:
    """The results in the order of the inputs, with a few submitted ahead.

    Raises:
        DataError: raised by the function, on any node.
    """
    return in_tasks(function, inputs) if _ray_has_room() else in_threads(function, inputs)


def one_by_one(function: Callable[[A], T], inputs: Iterable[A], *, on_ray: bool) -> Iterator[T]:
    """As `each`, for CPU-bound work: in this process, or with `on_ray` in one Ray task with a CPU per input."""
    if not on_ray:
        return map(function, inputs)
    start_ray()
    return in_tasks(function, inputs, cpus=1.0)


def start_ray() -> None:
    """Connects to the Ray of RAY_ADDRESS, or starts a local one, unless Ray is connected."""
    if is_begun() or not is_connected():
        connect()


def several_nodes() -> bool:
    """Whether Ray is connected and has more than one node."""
    if not is_connected():
        return False
    import ray

    return sum(node["Alive"] for node in ray.nodes()) > 1


def in_threads(function: Callable[[A], T], inputs: Iterable[A], threads: int = _THREADS) -> Iterator[T]:
    """As `each`, in threads of this process."""
    with ThreadPoolExecutor(threads) as pool:
        yield from _ahead(lambda item: pool.submit(function, item).result, inputs, 2 * threads)


def in_tasks(
    function: Callable[[A], T], inputs: Iterable[A], cpus: float = _CPUS, at_once: int | None = None
) -> Iterator[T]:
    """As `each`, in tasks of the connected Ray.

    Args:
        cpus: CPUs per task.
        at_once: number of submitted tasks; None: twice as many as the cluster can run at once.
    """
    import ray

    task: Any = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(_call)
    work = ray.put(function)

    def submit(item: A) -> Callable[[], T]:
        ref = task.remote(work, item)
        return lambda: answer(ref)

    return _ahead(submit, inputs, at_once or max(2, int(2 * ray.cluster_resources().get("CPU", 1.0) / cpus)))


def _ahead(submit: Callable[[A], Callable[[], T]], inputs: Iterable[A], at_once: int) -> Iterator[T]:
    pending: deque[Callable[[], T]] = deque()
    for item in inputs:
        pending.append(submit(item))
        if len(pending) >= at_once:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


def _ray_has_room() -> bool:
    if not is_connected():
        return False
    import ray

    return ray.available_resources().get("CPU", 0.0) >= _CPUS


def answer(ref: Any, timeout_s: float | None = None) -> Any:
    """The result of a task or an actor call; raises its DataError unchanged."""
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError):
            raise error.cause from None
        raise


def actor_here(kind: type, *args: Any) -> Any:
    """An actor on this process's node, so that the loss of another node does not end it. Ray restarts it if it dies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(num_cpus=0)(kind)
    return actor_class.options(max_restarts=-1, max_task_retries=-1, scheduling_strategy=this_node).remote(*args)


def _call(function: Callable[[A], T], item: A) -> T:
    return function(item)  # Ray needs a plain function; `function` may be a partial
