"""Steps of the tensor form on a pretended GPU: prints what it waited for, and whether its map is that of the loop.

python -m tests.dynamic_ids.on_pretended_gpu
"""

from __future__ import annotations

import tests.dryrun.guard  # noqa: F401  isort: skip  (before torch)

import json

import numpy as np
import torch

from rayrec.dynamic_ids import DeviceIdMap, DynamicIds, Evict, IdMap
from tests.dryrun.book import BOOK
from tests.dryrun.measure import install
from tests.dryrun.tensors import DEVICE, PretendCuda, Watch

RULES = [
    DynamicIds(rows=2048, evict=Evict.LFU_DECAY, half_life_s=5, ttl_s=9, min_count=2),
    DynamicIds(rows=2048, evict=Evict.LRU, probability=0.5),
]


def main() -> None:
    install(["rayrec"])
    draw, equal = np.random.default_rng(0), []
    with Watch():
        for config in RULES:
            host = IdMap(config)
            device = DeviceIdMap(host, DEVICE)
            for clock in range(1, 21):
                ids = draw.integers(0, 6000, 1500) // draw.integers(1, 9)
                on_device = torch.from_numpy(ids).pin_memory().to(DEVICE, non_blocking=True)
                BOOK.on = True
                mapped = device.step(on_device, clock)
                found = device.find(on_device)
                BOOK.on = False
                assert isinstance(mapped.rows, PretendCuda) and isinstance(found, PretendCuda)
                equal.append(bool((mapped.rows.cpu().numpy() == host.step(ids, clock).rows).all()))
                equal.append(bool((found.cpu().numpy() == host.find(ids)).all()))
            pairs = zip(device.to_host().state().values(), host.state().values(), strict=True)
            equal += [bool((one == other).all()) for one, other in pairs]
    syncs = [f"{times} x {kind} at {place}" for (kind, place), times in BOOK.syncs.items()]
    copies = [f"{times} x {kind} at {place}" for (kind, place), times in BOOK.copies.items()]
    operators = sum(BOOK.operators.values()) / (20 * len(RULES))
    answer = {"equal": all(equal), "syncs": syncs, "copies": copies, "mismatches": dict(BOOK.mismatches)}
    print(json.dumps(answer | {"operators": operators}))


if __name__ == "__main__":
    main()
