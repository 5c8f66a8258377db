"""Every collective that rayrec issues, one thin function each, and counters of them.

With `count_collectives` tests show that a step costs the same number of collectives whatever the plan.
For a group of None, or of one rank, nothing is sent.

Annotations are not strings here: DistributedDataParallel compares those of its hook with types.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_connect import connect
from rayrec.distributed.comm.host_link import HostLink, Wait
from rayrec.distributed.comm.trace import EXCHANGE, span

Group = dist.ProcessGroup | None

# torch 2.13 renames it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_counters: list[Counter[str]] = []
_byte_counters: list[Counter[str]] = []
_links: WeakKeyDictionary[dist.ProcessGroup, HostLink | None] = WeakKeyDictionary()
_CPU = torch.device("cpu")
SMALL_BYTES = 1 << 16  # of a sum on one host; up to this size every rank adds up all: one exchange instead of two


@contextmanager
def _counting(counters: list[Counter[str]]) -> Iterator[Counter[str]]:
    counter: Counter[str] = Counter()
    counters.append(counter)
    try:
        yield counter
    finally:
        counters[:] = [other for other in counters if other is not counter]  # equal numbers are not the same counter


def count_collectives() -> AbstractContextManager[Counter[str]]:
    """Counts the collectives of this process, by name, while the context is open."""
    return _counting(_counters)


def count_bytes() -> AbstractContextManager[Counter[str]]:
    """Counts the bytes that this process sends to others, by name, while the context is open.

    Not those of `exchange_on_hosts`, of broadcasts and of objects.
    """
    return _counting(_byte_counters)


def count(name: str, sent: int = 0) -> None:
    """Counts a collective, and the bytes that this process sends in it."""
    for counter in _counters:
        counter[name] += 1
    for counter in _byte_counters:
        counter[name] += sent


def alone(group: Group) -> bool:
    """Whether there is no other rank to exchange with."""
    return group is None or group.size() == 1


def link_of(group: dist.ProcessGroup, tensor: torch.Tensor) -> HostLink | None:
    """The link between the ranks of a group for CPU tensors; None if they are on several hosts, or for other tensors.

    Collective at its first call.
    """
    if tensor.device.type != "cpu":
        return None
    try:
        return _links[group]
    except KeyError:
        on_gloo = "gloo" in group._get_backend(_CPU).name().lower()
        link = _links[group] = connect(group) if on_gloo else None
        return link


def all_to_all(
    output: torch.Tensor,
    inputs: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: Group,
) -> Wait:
    """Sends `input_splits[r]` leading rows of `inputs` to each rank r, and receives `output_splits[r]` into `output`.

    Returns at once with a function that waits until `output` may be read. Without splits, parts are equal.
    """
    if group is None or group.size() == 1:
        output.copy_(inputs)
        return lambda: None
    kept = len(inputs) // group.size() if input_splits is None else input_splits[group.rank()]
    count("all_to_all", (len(inputs) - kept) * inputs[:1].nbytes if len(inputs) else 0)
    if (link := link_of(group, inputs)) is not None:
        return link.all_to_all(output, inputs, output_splits, input_splits)
    outs = None if output_splits is None else list(output_splits)
    ins = None if input_splits is None else list(input_splits)
    return _waiting(dist.all_to_all_single(output, inputs, outs, ins, group=group, async_op=True))


def _waiting(work: dist.Work) -> Wait:
    def wait() -> None:
        with span(EXCHANGE):
            work.wait()

    return wait


def exchange_messages(parts: Sequence[Sequence[torch.Tensor]], group: Group) -> Callable[[], list[torch.Tensor]]:
    """Sends the flat CPU tensors `parts[r]`, all of one type, to each rank r as one message of any size.

    Returns at once with a function that waits for every rank's message. Between hosts, sizes cost an exchange before.
    """
    assert group is not None
    own = torch.cat(list(parts[group.rank()]))
    sizes = [sum(map(torch.Tensor.numel, part)) for part in parts]
    count("all_to_all", (sum(sizes) - len(own)) * own.element_size())
    if (link := link_of(group, own)) is not None:
        return link.exchange(parts, own)
    words = torch.cat([piece for part in parts for piece in part])
    sent = torch.tensor(sizes, dtype=torch.int64)
    counts = torch.empty_like(sent)
    dist.all_to_all_single(counts, sent, group=group)
    received: list[int] = counts.tolist()
    arrived = words.new_empty(sum(received))
    wait = _waiting(dist.all_to_all_single(arrived, words, received, sizes, group=group, async_op=True))

    def messages() -> list[torch.Tensor]:
        wait()
        return list(arrived.split(received))

    return messages


def exchange_in_place(
    link: HostLink,
    leave: Sequence[int],
    write: Callable[[int, int], None],
    come: Sequence[int],
    read: Callable[[int, int, int], None],
) -> Wait:
    """Exchanges `leave[r]` and `come[r]` bytes with each rank r of a host; see `HostLink.in_place`."""
    count("all_to_all", sum(leave) - leave[link.rank])
    return link.in_place(leave, write, come, read)


def exchange_on_hosts(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """Sends row r of `inputs [W, N]` to each rank r, and waits for the rows received.

    Counted apart from `all_to_all`: both ends are in host memory, and no device waits.
    """
    if alone(group):
        return inputs
    count("exchange_on_hosts")
    assert group is not None
    output = torch.empty_like(inputs)
    if (link := link_of(group, inputs)) is not None:
        link.all_to_all(output, inputs)()
    else:
        with span(EXCHANGE):
            dist.all_to_all_single(output, inputs, group=group)
    return output


def all_gather(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """`[W, *shape]` of every rank's tensor; all of one shape."""
    if group is None or group.size() == 1:
        return inputs[None]
    count("all_gather", (group.size() - 1) * inputs.nbytes)
    output = inputs.new_empty((group.size(), *inputs.shape))
    if (link := link_of(group, inputs)) is not None:
        link.all_gather(output, inputs.contiguous(), [inputs.nbytes] * group.size())()
        return output
    _all_gather(output.view(-1), inputs.reshape(-1), group=group)
    return output


def all_gather_uneven(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """`[sum of N]` of every rank's vector `[N]`, in rank order; the host reads their lengths."""
    if alone(group):
        return inputs
    counts = all_gather(torch.tensor([len(inputs)], device=inputs.device), group).flatten().tolist()
    padded = inputs.new_zeros(max(counts))
    padded[: len(inputs)] = inputs
    return torch.cat([row[:count] for row, count in zip(all_gather(padded, group), counts, strict=True)])


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduces the tensor over ranks, in place; returns it."""
    if alone(group):
        return tensor
    assert group is not None
    count("all_reduce", 2 * (group.size() - 1) * tensor.nbytes // group.size())  # of a ring
    if op == dist.ReduceOp.SUM and (link := link_of(group, tensor)) is not None:
        total = tensor.detach().contiguous()
        begin_sum(link, total)()
        return tensor if total.data_ptr() == tensor.data_ptr() else tensor.copy_(total)
    with span(EXCHANGE):
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def broadcast(tensor: torch.Tensor, group: Group, src: int = 0) -> torch.Tensor:
    """Copies group rank `src`'s tensor to every rank, in place; returns the tensor."""
    if not alone(group):
        count("broadcast")
        dist.broadcast(tensor, group=group, group_src=src)
    return tensor


def begin_sum(link: HostLink, tensor: torch.Tensor) -> Wait:
    """Begins to add up a contiguous tensor over ranks, in place; do not change it before the wait has returned.

    Large sums go by parts: each rank adds up one, and sends its sum to the others. A rank's CPU time by parts, on 4
    ranks: 1.5 times that of adding up all for 32 KiB, 0.6 for 256 KiB, 0.4 for 2 MiB; on 3 ranks 0.7 for 256 KiB.
    """
    world, flat = link.world_size, tensor.view(-1)
    by_parts = world > 2 and tensor.nbytes > SMALL_BYTES
    parts = flat.tensor_split(world) if by_parts else [flat] * world
    sizes = [part.nbytes for part in parts]
    own = parts[link.rank]
    gathered = flat.new_empty(world * own.numel())
    if by_parts:
        wait = link.all_to_all(gathered, flat, [own.numel()] * world, [part.numel() for part in parts])
    else:
        wait = link.all_gather(gathered, flat, sizes)

    def finish() -> None:
        wait()
        if by_parts:
            link.all_gather(flat, gathered.view(world, -1).sum(0), sizes)()
        else:
            torch.sum(gathered.view(world, -1), 0, out=flat)

    return finish


def mean_of_gradients(group: dist.ProcessGroup | None, device: torch.device) -> Callable[..., Any] | None:
    """A hook for DistributedDataParallel that averages gradients among the CPU ranks of one host; else None.

    DistributedDataParallel calls it with each full bucket. A bucket is sent at once; with the last one, the hook waits
    for all. Collective at the first call for a group.
    """
    link = None if group is None or group.size() == 1 else link_of(group, torch.empty(0, device=device))
    if link is None:
        return None
    under_way: list[tuple[Wait, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        under_way.append((begin_sum(link, bucket.buffer()), bucket.buffer(), future))
        if bucket.is_last():
            for wait, gradients, result in under_way:
                wait()
                result.set_result(gradients.div_(link.world_size))
            under_way.clear()
        return future

    return hook
