"""Collectives of pretended GPUs: in a fake group every rank did what this one does; or a real group of gloo ranks."""

from __future__ import annotations

import sys

import torch
from torch.utils import _pytree as pytree

from tests.dryrun.book import BOOK
from tests.dryrun.tensors import PretendCuda, bound, unwrap


def nbytes(x):
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor))


def note(name, out, inp, size=0, inner=False):
    """Counts a collective and the bytes that this rank sends to others, by rings where it reduces or gathers."""
    if BOOK.on:
        key = (name.removeprefix("c10d::").strip("_") + " inside a host" * inner, BOOK.stage)
        others = (size - 1) / size if size else 1
        factor = others
        if "gather" in name:
            factor = size - 1
        elif "allreduce" in name:
            factor = 2 * others
        elif "broadcast" in name:
            factor = 1
        BOOK.collectives[key] += 1
        BOOK.sent_bytes[key] += int(nbytes(inp) * factor)


def of_objects():
    """Whether torch is sending pickled objects, for which it takes the current GPU under NCCL by itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name.endswith(("_object", "_object_list")) and "torch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def collective(name, func, args, kwargs):
    a, k = pytree.tree_map_only(PretendCuda, unwrap, (args, kwargs))
    raw = bound(func, a, k)
    cuda = any(isinstance(x, PretendCuda) for x in pytree.tree_leaves((args, kwargs)))
    hosts = [
        x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not isinstance(x, PretendCuda)
    ]
    on_hosts = "process_group" in raw and _name(raw["process_group"]) in BOOK.host_groups
    if on_hosts and cuda:
        BOOK.mismatch(f"{name} on CUDA tensors in a host group at {BOOK.place()}")
    if hosts and not on_hosts and BOOK.stage != "build" and not of_objects():
        BOOK.mismatch(f"{name} on CPU tensors (NCCL has no CPU collectives) at {BOOK.place()}")
    with BOOK.quiet(on_hosts):
        return _exchanged(name, func, args, kwargs, raw, a, k)


def _name(group):
    return torch._C._distributed_c10d.ProcessGroup.unbox(group).group_name


def _exchanged(name, func, args, kwargs, raw, a, k):
    if BOOK.strict or name != "c10d::alltoall_base_":
        result = func(*a, **k)
    else:  # the fake group refuses an empty input, which NCCL takes
        world = torch._C._distributed_c10d.ProcessGroup.unbox(raw["process_group"]).size()
        spare = torch.zeros(world)
        result = func(spare, spare.clone(), raw["process_group"], [], [], *a[5:], **k)
    if BOOK.strict:
        note(name, None, raw.get("input", raw.get("tensors")))
        back = {id(x.elem): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PretendCuda)}
        return pytree.tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)
    group = torch._C._distributed_c10d.ProcessGroup.unbox(raw["process_group"]) if "process_group" in raw else None
    rank, size, inner = group.rank(), group.size(), group.group_name in BOOK.inner_groups
    with torch.no_grad():
        if name == "c10d::alltoall_base_":
            out, inp = raw["output"], raw["input"]
            note(name, out, inp, size, inner)
            outs = list(raw["output_split_sizes"]) or [out.shape[0] // size] * size
            ins = list(raw["input_split_sizes"]) or [inp.shape[0] // size] * size
            mine = inp.split(ins)[rank]
            for chunk in out.split(outs):
                if chunk.shape == mine.shape:
                    chunk.copy_(mine)
                else:
                    chunk.zero_()
        elif name == "c10d::alltoall_":
            outs, ins = raw["output_tensors"], raw["input_tensors"]
            note(name, outs, ins, size)
            for o in outs:
                o.copy_(ins[rank]) if o.shape == ins[rank].shape else o.zero_()
        elif name == "c10d::_allgather_base_":
            out, inp = raw["output_tensor"], raw["input_tensor"]
            note(name, out, inp, size)
            out.view(size, -1).copy_(inp.reshape(1, -1).expand(size, -1))
        elif name == "c10d::allgather_":
            note(name, raw["output_tensors"], raw["input_tensors"], size)
            for outs, inp in zip(raw["output_tensors"], raw["input_tensors"], strict=False):
                for o in outs:
                    o.copy_(inp)
        elif name == "c10d::_reduce_scatter_base_":
            out, inp = raw["output_tensor"], raw["input_tensor"]
            note(name, out, inp, size)
            out.view(-1).copy_(inp.reshape(size, -1)[rank])
        elif name == "c10d::reduce_scatter_":
            note(name, raw["output_tensors"], raw["input_tensors"], size)
            for o, ins in zip(raw["output_tensors"], raw["input_tensors"], strict=False):
                o.copy_(ins[rank])
        else:
            note(name, None, raw.get("tensors"), size)
    back = {id(x.elem): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PretendCuda)}
    return pytree.tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)
