"""Every collective that rayrec issues, one thin function each, and counters of collectives.

`count_collectives` lets tests check that a step costs the same number of collectives under every plan. Nothing is sent
for a group of None or of one rank.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares its hook's annotations with types.

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_connect import connect
from rayrec.distributed.comm.host_link import HostLink, Read, Wait, Write
from rayrec.distributed.comm.trace import EXCHANGE, span

Group = dist.ProcessGroup | None

# torch 2.13 renames this function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_counters: list[Counter[str]] = []
_byte_counters: list[Counter[str]] = []
_links: WeakKeyDictionary[dist.ProcessGroup, HostLink | None] = WeakKeyDictionary()
_CPU = torch.device("cpu")
# Up to this size every rank of a host adds up the whole sum: one exchange instead of two.
SMALL_BYTES = 1 << 16


@contextmanager
def _counting(counters: list[Counter[str]]) -> Iterator[Counter[str]]:
    counter: Counter[str] = Counter()
    counters.append(counter)
    try:
        yield counter
    finally:
        # By identity: counters with equal numbers compare equal.
        counters[:] = [kept_counter for kept_counter in counters if kept_counter is not counter]


def count_collectives() -> AbstractContextManager[Counter[str]]:
    """Counts this process's collectives by name while the context is open."""
    return _counting(_counters)


def count_bytes() -> AbstractContextManager[Counter[str]]:
    """Counts the bytes that this process sends, by collective, while the context is open.

    Excludes `exchange_on_hosts`, broadcasts and objects.
    """
    return _counting(_byte_counters)


def count(name: str, sent: int = 0) -> None:
    """Counts a collective and the bytes that this process sends in it."""
    for counter in _counters:
        counter[name] += 1
    for counter in _byte_counters:
        counter[name] += sent


def alone(group: Group) -> bool:
    """Whether the group has no other rank."""
    return group is None or group.size() == 1


def link_of(group: dist.ProcessGroup, tensor: torch.Tensor) -> HostLink | None:
    """The link between the ranks of a group on one host. None for several hosts and for tensors on other devices.

    The first call is collective.
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

    Without splits, every rank gets an equal share. Returns immediately a function that waits until `output` is
    complete.
    """
    if group is None or group.size() == 1:
        output.copy_(inputs)
        return lambda: None
    own_rows = len(inputs) // group.size() if input_splits is None else input_splits[group.rank()]
    count("all_to_all", (len(inputs) - own_rows) * inputs[:1].nbytes if len(inputs) else 0)
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
    """Sends the flat CPU tensors `parts[r]`, all of one data type, to each rank r as one message of any size.

    Returns immediately a function that waits for every rank's message. Between hosts, sizes are exchanged first.
    """
    assert group is not None
    own_message = torch.cat(list(parts[group.rank()]))
    sizes = [sum(map(torch.Tensor.numel, tensors)) for tensors in parts]
    count("all_to_all", (sum(sizes) - len(own_message)) * own_message.element_size())
    if (link := link_of(group, own_message)) is not None:
        return link.exchange(parts, own_message)
    words = torch.cat([tensor for tensors in parts for tensor in tensors])
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
    write: Write,
    come: Sequence[int],
    read: Read,
) -> Wait:
    """Exchanges `leave[r]` and `come[r]` bytes with each rank r of a host; see `HostLink.in_place`."""
    count("all_to_all", sum(leave) - leave[link.rank])
    return link.in_place(leave, write, come, read)


def exchange_on_hosts(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """Sends row r of `inputs [W, N]` to each rank r, and returns the rows received.

    Counted separately from `all_to_all`, because it stays in host memory and no device waits.
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
    """Stacks every rank's tensor, all of one shape, to `[W, *shape]`."""
    if group is None or group.size() == 1:
        return inputs[None]
    count("all_gather", (group.size() - 1) * inputs.nbytes)
    output = inputs.new_empty((group.size(), *inputs.shape))
    if (link := link_of(group, inputs)) is not None:
        link.all_gather(output, inputs.contiguous(), [inputs.nbytes] * group.size())()
        return output
    _all_gather(output.view(-1), inputs.reshape(-1), group=group)
    return output


def tree_of(group: dist.ProcessGroup) -> tuple[list[int], int | None]:
    """This rank's place in a binomial tree over the ranks: from whom it receives, in this order, and to whom it sends
    what it merged; None on rank 0. What it merges is of consecutive ranks."""
    rank, world_size, step = group.rank(), group.size(), 1
    children = []
    while step < world_size and not rank & step:
        if rank + step < world_size:
            children.append(rank + step)
        step *= 2
    return children, rank - step if rank else None


def combine(vector: torch.Tensor, group: Group, merge: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Merges a small CPU vector `[N]` of each rank to one, which every rank returns.

    On several hosts, 2·log2(W) messages follow one another, along a binomial tree: fewer than in gloo's all-gather (W)
    and all-reduce (2·W), which send around a ring.

    Args:
        merge: From the vectors of consecutive ranks, `[R, N]`, to `[N]`; associative.
    """
    if group is None or group.size() == 1:
        return merge(vector[None])
    if (link := link_of(group, vector)) is not None:
        count("combine", (group.size() - 1) * vector.nbytes)
        rows = vector.new_empty((group.size(), *vector.shape))
        link.all_gather(rows, vector.contiguous(), [vector.nbytes] * group.size())()
        return merge(rows)
    children, parent = tree_of(group)
    count("combine", 0 if parent is None else vector.nbytes)
    with span(EXCHANGE):
        merged, received = vector.clone(), torch.empty_like(vector)
        for child in children:
            dist.recv(received, group=group, group_src=child)
            merged = merge(torch.stack([merged, received]))
        if parent is not None:
            dist.send(merged, group=group, group_dst=parent)
        dist.broadcast(merged, group=group, group_src=0)  # gloo's is a binomial tree too
    return merged


def sum_on_rank_0(tensor: torch.Tensor, group: Group) -> torch.Tensor | None:
    """The sum over ranks of a CPU tensor on group rank 0; None on the others.

    On several hosts, log2(W) messages follow one another, where 2·W do in gloo's all-reduce, which sends parts of the
    tensor around a ring: that is slower for tensors of up to some MB on hundreds of ranks.
    """
    if group is None or group.size() == 1:
        return tensor
    children, parent = tree_of(group)
    if link_of(group, tensor) is not None:
        total = all_reduce(tensor.clone(), group)
        return total if parent is None else None
    count("sum_on_rank_0", 0 if parent is None else tensor.nbytes)
    with span(EXCHANGE):
        total, received = tensor.clone(), torch.empty_like(tensor)
        for child in children:
            dist.recv(received, group=group, group_src=child)
            total += received
        if parent is not None:
            dist.send(total, group=group, group_dst=parent)
    return total if parent is None else None


def all_gather_uneven(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenates every rank's vector `[N]` in rank order. Waits for the device to read the lengths."""
    if alone(group):
        return inputs
    counts = all_gather(torch.tensor([len(inputs)], device=inputs.device), group).flatten().tolist()
    padded = inputs.new_zeros(max(counts))
    padded[: len(inputs)] = inputs
    return torch.cat([row[:count] for row, count in zip(all_gather(padded, group), counts, strict=True)])


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduces the tensor over ranks in place and returns it."""
    if alone(group):
        return tensor
    assert group is not None
    count("all_reduce", 2 * (group.size() - 1) * tensor.nbytes // group.size())  # as a ring
    if op == dist.ReduceOp.SUM and (link := link_of(group, tensor)) is not None:
        total = tensor.detach().contiguous()
        start_sum(link, total)()
        return tensor if total.data_ptr() == tensor.data_ptr() else tensor.copy_(total)
    with span(EXCHANGE):
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def broadcast(tensor: torch.Tensor, group: Group, src: int = 0) -> torch.Tensor:
    """Copies the tensor of group rank `src` to every rank in place and returns it."""
    if not alone(group):
        count("broadcast")
        dist.broadcast(tensor, group=group, group_src=src)
    return tensor


def start_sum(link: HostLink, tensor: torch.Tensor) -> Wait:
    """Starts a sum of a contiguous tensor over ranks, in place. Do not change the tensor before the wait returns.

    Each rank adds up one segment of a large tensor and sends it to the other ranks. CPU time relative to adding up the
    whole tensor on every rank: 1.5 for 32 KiB, 0.6 for 256 KiB and 0.4 for 2 MiB on 4 ranks, 0.7 for 256 KiB on 3.
    """
    world, flat = link.world_size, tensor.view(-1)
    by_segment = world > 2 and tensor.nbytes > SMALL_BYTES
    segments = flat.tensor_split(world) if by_segment else [flat] * world
    sizes = [segment.nbytes for segment in segments]
    own_segment = segments[link.rank]
    gathered = flat.new_empty(world * own_segment.numel())
    if by_segment:
        wait = link.all_to_all(gathered, flat, [own_segment.numel()] * world, [s.numel() for s in segments])
    else:
        wait = link.all_gather(gathered, flat, sizes)

    def finish() -> None:
        wait()
        if by_segment:
            link.all_gather(flat, gathered.view(world, -1).sum(0), sizes)()
        else:
            torch.sum(gathered.view(world, -1), 0, out=flat)

    return finish


def mean_of_gradients(group: dist.ProcessGroup | None, device: torch.device) -> Callable[..., Any] | None:
    """A hook for DistributedDataParallel that averages gradients among the CPU ranks of one host; None elsewhere.

    DistributedDataParallel calls it with each full bucket. The hook sends a bucket immediately, and waits for all
    buckets with the last one. The first call for a group is collective.
    """
    link = None if group is None or group.size() == 1 else link_of(group, torch.empty(0, device=device))
    if link is None:
        return None
    under_way: list[tuple[Wait, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        under_way.append((start_sum(link, bucket.buffer()), bucket.buffer(), future))
        if bucket.is_last():
            for wait, gradients, result in under_way:
                wait()
                result.set_result(gradients.div_(link.world_size))
            under_way.clear()
        return future

    return hook
