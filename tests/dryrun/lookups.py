"""fbgemm's CUDA lookup and DDP's all-reduce, which a CPU build lacks."""

from __future__ import annotations

import inspect
import time
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from tests.dryrun.book import BOOK
from tests.dryrun.tensors import DEVICE, PretendCuda, unwrap
from tests.dryrun.updates import look_up, on_cuda_only


@contextmanager
def simulated():
    """What a GPU would do: neither seen nor counted as the host's time."""
    start = time.thread_time()
    with torch.utils._python_dispatch._disable_current_modes():
        yield
    BOOK.simulation_s += time.thread_time() - start


def stub_tbe():
    """fbgemm's CUDA lookup, which the CPU wheel lacks: right shapes, one op forward and one backward; see EXACT."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as training

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, common, weights, name, invoke, args, kwargs):
            offsets, indices = common.offsets, common.indices
            for what, t in (("indices", indices), ("offsets", offsets), ("weights", common.indice_weights),
                            ("dev_weights", common.dev_weights), ("D_offsets", common.D_offsets)):  # fmt: skip
                if t is not None and not isinstance(t, PretendCuda):
                    BOOK.mismatch(f"TBE: {what} is on {t.device} at {BOOK.place()}")
            if indices.dtype != offsets.dtype:
                BOOK.mismatch(f"TBE: indices {indices.dtype} and offsets {offsets.dtype} differ at {BOOK.place()}")
            features = common.D_offsets.numel() - 1
            ctx.weights, ctx.exact = weights, None
            BOOK.operator("fbgemm::TBE_FORWARD(stub)")
            if BOOK.strict:
                return exact(ctx, common, weights, name, invoke, args, kwargs)
            vbe = common.vbe_metadata
            if int(common.pooling_mode) == 2:
                shape = (indices.numel(), common.max_D)
            elif vbe is not None and vbe.B_offsets is not None:
                shape = (1, vbe.output_size)
            else:
                shape = ((offsets.numel() - 1) // max(features, 1), common.total_D)
            with simulated():
                return PretendCuda(torch.zeros(shape))

        @staticmethod
        def backward(ctx, grad):
            BOOK.operator("fbgemm::TBE_BACKWARD(stub)")
            if not isinstance(grad, PretendCuda):
                BOOK.mismatch(f"TBE backward: gradient on {grad.device}")
            with simulated():
                back = None if ctx.weights is None else torch.zeros(ctx.weights.shape)
                if ctx.exact is not None:
                    train, own = ctx.exact
                    train(unwrap(grad).contiguous())
                    back = own.grad if own is not None and own.grad is not None else back
                return None, None, None if back is None else PretendCuda(back), None, None, None, None

    def exact(ctx, common, weights, name, invoke, args, kwargs):
        def plain(x):
            return type(x)(*(unwrap(v) for v in x)) if isinstance(x, tuple) and hasattr(x, "_fields") else unwrap(x)

        with torch.utils._python_dispatch._disable_current_modes(), torch.enable_grad():
            given = plain(common)
            own = None if weights is None else given.indice_weights.detach().requires_grad_(weights.requires_grad)
            given = given._replace(
                host_weights=given.dev_weights.detach(), indice_weights=own, vbe_metadata=plain(common.vbe_metadata),
                weights_placements=torch.full_like(given.weights_placements, 3),
                placeholder_autograd_tensor=torch.zeros(0, requires_grad=True),
            )  # fmt: skip
            arguments = inspect.signature(invoke).bind(given, *args, **kwargs).arguments
            for key, arg in arguments.items():
                arg = arguments[key] = plain(arg)
                if type(arg).__name__ == "Momentum":
                    arguments[key] = arg._replace(host=arg.dev.detach())
            if on_cuda_only(name, arguments):
                out, train = look_up(name, given, arguments)
            else:
                out = invoke(**arguments)
                train = partial(torch.autograd.backward, out) if out.requires_grad else lambda grad: None
            ctx.exact = (train, own)
            return PretendCuda(out.detach())

    def stand_in(name, real):
        def invoke(common_args, *args, **kwargs):
            anchor, weights = common_args.placeholder_autograd_tensor, common_args.indice_weights
            return Lookup.apply(anchor, common_args, weights, name, real, args, kwargs)

        return invoke

    for name in dir(training.invokers):
        module = getattr(training.invokers, name)
        if name.startswith("lookup_") and hasattr(module, "invoke"):
            module.invoke = stand_in(name.removeprefix("lookup_"), module.invoke)
    return training


class Anything:
    def __getattr__(self, name):
        return lambda *a, **k: None


def stub_ddp_collective():
    """DDP itself is real; only its all-reduce goes by way of a hook, as the fake group's futures hold nothing."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    real = DDP.__init__

    def init(self, *args, **kwargs):
        real(self, *args, **kwargs)
        group = self.process_group

        def hook(state, bucket):
            buffer = bucket.buffer()
            buffer.div_(group.size())
            dist.all_reduce(buffer, group=group, async_op=True).wait()
            future = torch.futures.Future(devices=[DEVICE])
            future.set_result(buffer)
            return future

        self.register_comm_hook(None, hook)
        self.logger = Anything()  # the real one wants CUDA timers

    DDP.__init__ = init
