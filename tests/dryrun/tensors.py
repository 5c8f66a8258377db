"""Tensors that say they are on cuda:0, and what each operator on them would mean to a GPU."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dryrun.book import BOOK

DEVICE = torch.device("cuda", 0)


class PretendCuda(torch.Tensor):
    """A wrapper that says it is on cuda:0, around a real CPU tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, elem):
        self.elem = elem

    def __repr__(self):
        return f"PretendCuda({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo):
        out = PretendCuda(self.elem.detach().clone())
        out.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            out._is_param = True
        memo[id(self)] = out
        return out

    def data_ptr(self):
        return self.elem.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream): ...

    def __reduce_ex__(self, protocol):
        BOOK.sync("pickle (D2H)")
        return (_rebuild, (self.elem.detach().clone(),))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def _rebuild(elem):
    return PretendCuda(elem)


def unwrap(x):
    return x.elem if isinstance(x, PretendCuda) else x


aten, fbgemm, c10d = torch.ops.aten, torch.ops.fbgemm, torch.ops.c10d
GENERATORS = set()  # those made for cuda
PINNED = set()  # data_ptr of storages that were "pinned"
# operators whose CUDA kernel waits for the host to read a size
SYNC_OPS = {
    "aten::_local_scalar_dense": "item/bool/int/float",
    "aten::item": "item",
    "aten::nonzero": "output size",
    "aten::masked_select": "output size",
    "aten::_unique2": "output size",
    "aten::unique_dim": "output size",
    "aten::unique_consecutive": "output size",
    "aten::unique_dim_consecutive": "output size",
    "aten::bincount": "max is read",
    "aten::equal": "bool",  # and of tests
    "aten::is_nonzero": "bool",
    "aten::histc": "range is read",
    "aten::multinomial": "check",
    "aten::to_dense": "",
}
ALLOCATIONS = {
    "aten::empty",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::empty_like",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_",
}
METADATA = {
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::sym_size",
    "aten::_has_compatible_shallow_copy_type",
    "aten::split_with_sizes",
    "aten::detach_",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::lift",
}


def is_view(func):
    known = VIEWS.get(func)
    if known is None:
        schema = func._schema
        known = VIEWS[func] = schema.name in METADATA or (
            bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        )
    return known


VIEWS = {}


def _pinned(t):
    return t.untyped_storage().data_ptr() in PINNED


def run(func, args, kwargs):
    start = time.thread_time()
    try:
        return _run(func, args, kwargs)
    finally:
        BOOK.simulation_s += time.thread_time() - start
        BOOK.crossings += 1


def _run(func, args, kwargs):
    name = func._schema.name
    if name.startswith("c10d::"):
        from tests.dryrun.exchanges import collective

        return collective(name, func, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    cudas = [x for x in leaves if isinstance(x, PretendCuda)]
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        if device.type == "cuda":
            kwargs = dict(kwargs, device=torch.device("cpu"))
    if kwargs.get("pin_memory"):
        kwargs = dict(kwargs, pin_memory=False)
        out = func(*args, **kwargs)
        PINNED.add(out.untyped_storage().data_ptr())
        return out
    if not cudas and (device is None or device.type != "cuda"):
        if name == "aten::_pin_memory":
            out = args[0].clone()
            PINNED.add(out.untyped_storage().data_ptr())
            return out
        if name == "aten::is_pinned":
            return _pinned(args[0])
        start = time.thread_time()
        out = func(*args, **kwargs)
        BOOK.simulation_s -= time.thread_time() - start  # the host does this for itself
        return out
    if name == "aten::record_stream":
        return None
    if name == "aten::is_pinned":
        return False
    # copies between devices
    if name == "aten::_to_copy":
        return to_copy(func, args, kwargs, device)
    if name == "aten::copy_":
        dst, src = args[0], args[1]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(dst, PretendCuda) != isinstance(src, PretendCuda):
            crossing(isinstance(dst, PretendCuda), blocking, src if isinstance(dst, PretendCuda) else dst, src.nbytes)
        BOOK.operator(name)
        unwrap(dst).copy_(unwrap(src))
        return dst
    if name == "aten::_local_scalar_dense":
        BOOK.sync("D2H item()/bool()/int()")
        return func(args[0].elem)
    # mixed devices
    hosts = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, PretendCuda) and x.dim() > 0]
    if hosts and cudas:
        indices = name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
        if indices and isinstance(args[0], PretendCuda):
            BOOK.sync("H2D of a CPU index tensor")
        else:
            shapes = [tuple(h.shape) for h in hosts]
            BOOK.mismatch(f"{name}: CPU tensor(s) {shapes} with CUDA tensors at {BOOK.place()}")
    generator = kwargs.get("generator")
    if generator is not None and generator._cdata not in GENERATORS:
        BOOK.mismatch(f"{name}: CPU generator for a CUDA tensor at {BOOK.place()}")
    sync = SYNC_OPS.get(name)
    if sync is not None:
        BOOK.sync(f"op reads the device ({sync})")
    elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        BOOK.sync("op reads the device (output size)")
    elif name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            BOOK.sync("op reads the device (bool mask)")
    elif name.startswith("fbgemm::"):
        fbgemm_syncs(name, func, args, kwargs)
    if not is_view(func) and name not in ALLOCATIONS:
        BOOK.operator(name)
    a, k = pytree.tree_map_only(PretendCuda, unwrap, (args, kwargs))
    if name.startswith("torch_attn::"):  # kernels that only a GPU has: results of the right shapes
        fakes = sys.modules["torch.nn.attention.varlen"]
        fake = getattr(fakes, name.removeprefix("torch_attn::") + "_fake")
        out = pytree.tree_map_only(torch.Tensor, torch.zeros_like, fake(*a, **k))
    else:
        out = func(*a, **k)
    found = wrap_out(func, out, args, kwargs, a)
    if is_view(func) and cudas:
        share_storage(found, cudas[0])
    return found


def share_storage(views, base):
    """Views report the storage of their base, so that `is_alias_of` answers as on a GPU (DDP asks it)."""
    for view in pytree.tree_leaves(views):
        if isinstance(view, PretendCuda):
            torch._functionalize_unsafe_set(view, base)


def wrap_out(func, out, args, kwargs, inner):
    """Results as pretend tensors; what was written in place is the very argument."""
    back = {}
    for x in pytree.tree_leaves((args, kwargs)):
        if isinstance(x, PretendCuda):
            back[id(x.elem)] = x

    def one(t):
        given = back.get(id(t))
        if given is not None:
            if given.shape != t.shape:  # resized in place
                with torch.utils._python_dispatch._disable_current_modes():
                    fixed = PretendCuda(t)
                return fixed
            return given
        return PretendCuda(t)

    return pytree.tree_map_only(torch.Tensor, one, out)


def crossing(to_cuda, blocking, host, nbytes):
    pinned = _pinned(host) if to_cuda or not blocking else False
    if to_cuda:
        if blocking:
            BOOK.sync(f"H2D copy, blocking, {'pinned' if pinned else 'pageable'}")
        elif not pinned:
            BOOK.copy("H2D copy, non_blocking but pageable (staged)")
        else:
            BOOK.copy("H2D copy, pinned, async")
    elif blocking:
        BOOK.sync("D2H copy, blocking (cpu()/tolist()/numpy())")
    else:
        BOOK.copy("D2H copy, non_blocking")


def to_copy(func, args, kwargs, device):
    src = args[0]
    from_cuda = isinstance(src, PretendCuda)
    to_cuda = from_cuda if device is None else device.type == "cuda"
    blocking = not kwargs.get("non_blocking", False)
    if from_cuda != to_cuda:
        crossing(to_cuda, blocking, src if to_cuda else torch.empty(0), src.nbytes)
    BOOK.operator("aten::_to_copy")
    inner = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    out = func(unwrap(src), **inner)
    return PretendCuda(out) if to_cuda else out


def bound(func, args, kwargs):
    names = [a.name for a in func._schema.arguments]
    values = {a.name: (a.default_value if a.has_default_value() else None) for a in func._schema.arguments}
    values.update(zip(names, args, strict=False))
    values.update(kwargs)
    return values


def fbgemm_syncs(name, func, args, kwargs):
    given = bound(func, args, kwargs)
    if (
        name in ("fbgemm::permute_2D_sparse_data", "fbgemm::permute_1D_sparse_data", "fbgemm::permute_sparse_data")
        and given.get("permuted_lengths_sum") is None
    ):
        BOOK.sync("fbgemm op reads the device (permuted_lengths_sum not given)")
    if name == "fbgemm::expand_into_jagged_permute" and given.get("output_size") is None:
        BOOK.sync("fbgemm op reads the device")
    if name == "fbgemm::block_bucketize_sparse_features" and given.get("block_bucketize_pos") is not None:
        BOOK.copy("H2D copy inside fbgemm (offsets of block_bucketize_pos, pageable)")
    if name in ("fbgemm::keyed_jagged_index_select_dim1",) and given.get("selected_lengths_sum") is None:
        BOOK.sync("fbgemm op reads the device")
    if name in ("fbgemm::jagged_index_select", "fbgemm::jagged_unique_indices"):
        BOOK.sync("fbgemm op reads the device (output size)")


class Watch(TorchDispatchMode):
    """Operators that make tensors are seen, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})
