"""torch.cuda as far as rayrec, fbgemm and torch ask it."""

from __future__ import annotations

import contextlib
import sys
import types

import torch
import torch.distributed as dist

from tests.dryrun.book import BOOK
from tests.dryrun.tensors import DEVICE, GENERATORS, PretendCuda, _pinned


class Stream:
    def __init__(self, device=None, priority=0, **kw):
        self.device, self.cuda_stream, self.stream_id = DEVICE, 0, 0
        self.device_index, self.device_type, self.priority = 0, 1, priority

    def wait_stream(self, other): ...
    def wait_event(self, event): ...
    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True

    def synchronize(self):
        BOOK.sync("stream.synchronize()")

    def __enter__(self):
        return self

    def __exit__(self, *exc): ...


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False): ...
    def record(self, stream=None): ...
    def wait(self, stream=None): ...
    def query(self):
        return True

    def synchronize(self):
        BOOK.sync("event.synchronize()")

    def elapsed_time(self, other):
        return 0.0


def pretend_gpu():
    """Installs all stubs of torch; see the header."""
    torch._C._set_only_lift_cpu_tensors(True)
    # `.data =` cannot make a CPU parameter a pretend one
    torch._has_compatible_shallow_copy_type = lambda a, b: isinstance(a, PretendCuda) == isinstance(b, PretendCuda)
    cuda = torch.cuda
    props = types.SimpleNamespace(
        name="pretend H100",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
    )
    stream, nothing = Stream(), lambda *a, **k: None
    fakes = {
        "_lazy_init": nothing,
        "init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": nothing,
        "get_device_properties": lambda *a: props,
        "get_device_capability": lambda *a: (9, 0),
        "get_device_name": lambda *a: props.name,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *a: stream,
        "default_stream": lambda *a: stream,
        "set_stream": nothing,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda *a: BOOK.sync("cuda.synchronize()"),
        "is_current_stream_capturing": lambda: False,
        "memory_reserved": lambda *a: 0,
        "memory_allocated": lambda *a: 0,
        "max_memory_allocated": lambda *a: 0,
        "empty_cache": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "device": lambda d: contextlib.nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "mem_get_info": lambda *a: (80 << 30, 80 << 30),
        "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *a: {},
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
    }
    for name, fake in fakes.items():
        setattr(cuda, name, fake)
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = sys.modules.get(name) or __import__(name, fromlist=["x"])
        module._foreach_supported_types.append(PretendCuda)
    torch.Tensor.pin_memory = lambda self, *a: torch.ops.aten._pin_memory(self)
    torch.Tensor.is_pinned = lambda self, *a: not self.is_cuda and _pinned(self)
    if not BOOK.strict:
        dist.broadcast_object_list = nothing
    real = torch.Generator

    class Generator(real):
        """A CPU generator that may say it is on cuda:0."""

        def __new__(cls, device="cpu"):
            out = super().__new__(cls, "cpu")
            (GENERATORS.add if torch.device(device).type == "cuda" else GENERATORS.discard)(out._cdata)
            return out

    torch.Generator = Generator
