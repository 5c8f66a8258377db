"""Runs cases on pretended GPUs and tells what they met.

python -m tests.dryrun.measure '[{"world": 8, "plan": "mixed_dp"}]'
"""

from __future__ import annotations

import tests.dryrun.guard  # noqa: F401  isort: skip  (before torch)

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from tests.dryrun.book import BOOK

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's numbers
SETTLED_S = 1.5  # by then a pipeline's thread has sent what it may: one batch's ids a step, none of the next one's


def install(packages: Sequence[str]) -> None:
    """From here on this process's "cuda" is a pretended one; places of `packages`, the first above all, are told."""
    from tests.dryrun.cuda import pretend_gpu
    from tests.dryrun.lookups import stub_ddp_collective, stub_tbe
    from tests.dryrun.ranks import watch_threads

    # what a pretended GPU frees is kept: to give pages back to the system would count as the host's time
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    pretend_gpu()
    fbgemm = stub_tbe()
    stub_ddp_collective()
    modules = [*(importlib.import_module(package.split(".")[0]) for package in packages), fbgemm]
    BOOK.roots = [os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in modules]
    watch_threads()
    torch.autograd.set_multithreading_enabled(False)
    gc.freeze()  # the packages' objects: a collection would look at all of them, for 0.3 s, before every step


def main() -> None:
    """A JSON line for each case."""
    install(["rayrec"])
    from tests.dryrun.cases import Case, fake_world, mark_stages
    from tests.dryrun.tensors import Watch

    mark_stages()
    for settings in json.loads(sys.argv[1]):
        case = Case(**settings)
        BOOK.clear()
        BOOK.mismatches.clear()
        BOOK.stage = "build"
        with fake_world(case.world), Watch():
            try:
                answer = measure(case)
            except Exception:
                answer = {"error": traceback.format_exc()}
        print(json.dumps({"name": case.name, **answer}), flush=True)


def measure(case: Any) -> dict[str, Any]:
    from rayrec.distributed import TrainPipeline, comm
    from rayrec.models import Retriever
    from tests.dryrun.cases import BUILT_IN, make_batch, make_model, make_rows
    from tests.dryrun.resume import save_spoil_and_load
    from tests.dryrun.tensors import DEVICE

    generator = torch.Generator().manual_seed(0)
    model = make_model(case)
    dense = torch.optim.Adagrad(model.dense_parameters().values(), lr=0.01)
    state = model.state_dict(), model.fused_optimizer.state_dict()
    batches: list[Any] = []
    for number in range(case.steps + 2):  # a pipeline reads ahead
        batch: Any = make_rows(case, generator) if case.model in BUILT_IN else make_batch(case, generator)
        if isinstance(model.module, Retriever):
            batch = model.module.prepare(batch, number, comm.host_group(dist.group.WORLD, DEVICE))
        batches.append(batch.pin_memory())
    ahead = TrainPipeline[Any](model, features=lambda batch: getattr(batch, "looked_up", batch)).ahead
    source = iter(ahead(batches) if case.pipelined else batches)
    host_s, restored = [], 0
    for step in range(case.steps):
        counted = step == case.steps - 1
        if case.resumed and counted:
            restored = save_spoil_and_load(model, dense)
        gc.collect()
        if case.pipelined and counted:
            time.sleep(SETTLED_S)
        BOOK.clear()
        BOOK.on, BOOK.stage = True, "dense"
        start = time.process_time()
        batch = next(source)
        with torch.autocast("cuda", torch.bfloat16, enabled=case.bf16):
            loss = model(batch)[0] if case.model in BUILT_IN else model(batch)
        BOOK.stage = "backward"
        dense.zero_grad()
        loss.backward()
        BOOK.stage = "optimizer"
        dense.step()
        if case.pipelined and counted:
            time.sleep(SETTLED_S)
        BOOK.on = False
        host_s.append(time.process_time() - start - BOOK.simulation_s)
        del loss
    stages: Counter[str] = Counter()
    for (stage, _, _), times in BOOK.operators.items():
        stages[stage] += times
    return {
        "mismatches": dict(BOOK.mismatches),
        "syncs": [f"{times} x {kind} at {place}" for (kind, place), times in BOOK.syncs.items()],
        "copies": [f"{times} x {kind} at {place}" for (kind, place), times in BOOK.copies.items()],
        "collectives": {f"{name} in {stage}": times for (name, stage), times in BOOK.collectives.items()},
        "sent_bytes": {f"{name} in {stage}": size for (name, stage), size in BOOK.sent_bytes.items()},
        "operators": dict(stages),
        "places": [f"{n} x {stage} {op} {place}" for (stage, op, place), n in BOOK.operators.most_common()],
        "host_ms": 1000 * min(host_s[1:]),
        "tables": len(state[0]),
        "restored": restored,
    }


if __name__ == "__main__":
    main()
