"""A whole training step of a DLRM by rayrec and by TorchRec on pretended GPUs, step by step in turns in one process.

PYTHONPATH=.:/where/torchrec/is python -m tests.dryrun.against '[{"world": 64, "plan": "row_wise"}]' --steps 20

The model is written once, in names that both packages have. TorchRec must be installed in a folder of its own; with
`--alone` rayrec runs without it.
"""

from __future__ import annotations

import tests.dryrun.guard  # noqa: F401  isort: skip  (before torch)

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from tests.dryrun.book import BOOK
from tests.dryrun.measure import install

TABLES, ROWS, DIM, BATCH, DENSE = 26, 20_000, 64, 64, 13
WARM_UP = 3  # steps
BOTTOM, TOP = [512, 256, DIM], [1024, 1024, 512, 256, 1]
MIXED = ("table_wise", "row_wise", "column_wise")


@dataclass
class Input:
    """A batch, by the names that DLRMTrain reads."""

    dense_features: torch.Tensor
    sparse_features: Any
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Input:
        return Input(*(part.to(device=device, non_blocking=non_blocking) for part in vars(self).values()))

    def pin_memory(self) -> Input:
        return Input(*(part.pin_memory() for part in vars(self).values()))


@dataclass
class Contender:
    """A package with its model, and what its steps took.

    Args:
        package: "rayrec.torchrec" or "torchrec".
        width: of a table.
    """

    package: str
    world: int
    plan: str
    width: int = DIM
    host_s: list[float] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from tests.dryrun.tensors import DEVICE

        self.device = DEVICE
        models, modules = self._of("models.dlrm"), self._of("modules.embedding_modules")
        configs = [
            self._of("modules.embedding_configs").EmbeddingBagConfig(
                name=f"t{n}", num_embeddings=ROWS, embedding_dim=self.width, feature_names=[f"f{n}"]
            )
            for n in range(TABLES)
        ]
        bags = modules.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        bottom = [*BOTTOM[:-1], self.width]
        self.model = self._sharded(models.DLRMTrain(models.DLRM(bags, DENSE, bottom, TOP, dense_device=DEVICE)), bags)
        in_backward = self._of("optim.optimizers").in_backward_optimizer_filter(self.model.named_parameters())
        self.dense = torch.optim.Adagrad([parameter for _, parameter in in_backward], lr=0.01)

    def _of(self, module: str) -> Any:
        package = "rayrec.torchrec" if self.package == "rayrec" else self.package
        return importlib.import_module(f"{package}.{module}")

    def _sharded(self, model: torch.nn.Module, bags: Any) -> Any:
        plans, types = self._of("distributed.sharding_plan"), self._of("distributed.types")
        optimizer = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
        params = {"optimizer": optimizer, "learning_rate": 0.01}
        sharder = self._of("distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params=params)
        kinds = MIXED if self.plan == "mixed" else (self.plan,)
        how = {f"t{n}": self._cut(plans, n, kinds[n % len(kinds)]) for n in range(TABLES)}
        sizes = {"local_size": self.world, "world_size": self.world, "device_type": "cuda"}
        plan = plans.construct_module_sharding_plan(bags, how, sharder, **sizes)
        return self._of("distributed.model_parallel").DistributedModelParallel(
            model,
            env=types.ShardingEnv.from_process_group(torch.distributed.new_group(range(self.world))),
            device=self.device,
            plan=types.ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
            sharders=[sharder],
        )

    def _cut(self, plans: Any, number: int, kind: str) -> Any:
        if kind == "table_wise":
            return plans.table_wise(rank=number % self.world, device="cuda", compute_kernel="fused")
        if kind == "row_wise":
            return plans.row_wise(compute_kernel="fused")
        ranks = [(number + other) % self.world for other in range(min(4, self.world))]
        return plans.column_wise(ranks=ranks, compute_kernel="fused")

    def batch(self, generator: torch.Generator) -> Input:
        """One id a bag, pinned."""
        ids = torch.randint(0, ROWS, (TABLES * BATCH,), generator=generator)
        kjt = self._of("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
            keys=[f"f{n}" for n in range(TABLES)], values=ids, lengths=torch.ones(TABLES * BATCH, dtype=torch.int32)
        )
        dense = torch.rand(BATCH, DENSE, generator=generator)
        return Input(dense, kjt, (torch.rand(BATCH, generator=generator) > 0.5).float()).pin_memory()

    def step(self, given: Input) -> None:
        BOOK.clear()
        BOOK.on, BOOK.stage = True, "step"
        start = time.process_time()
        batch = given.to(self.device, non_blocking=True)
        self.dense.zero_grad(set_to_none=True)
        self.model(batch)[0].backward()
        self.dense.step()
        took = time.process_time() - start
        BOOK.on = False
        self.host_s.append(took - BOOK.simulation_s - crossing_s() * BOOK.crossings)
        self.seen = {
            "operators": sum(BOOK.operators.values()),
            "syncs": sum(BOOK.syncs.values()),
            "collectives": sum(BOOK.collectives.values()),
            "kilobytes": sum(BOOK.sent_bytes.values()) // 1000,
        }

    @property
    def median_ms(self) -> float:
        return round(1000 * statistics.median(self.host_s[WARM_UP:]), 2)

    def over(self, other: Contender) -> float:
        """The median of the ratios of their steps."""
        pairs = zip(self.host_s[WARM_UP:], other.host_s[WARM_UP:], strict=True)
        return round(statistics.median(own / others for own, others in pairs), 3)


_crossing: list[float] = []


def crossing_s() -> float:
    """CPU seconds from an operator's call to its handler and back, beyond a plain dispatch: not the package's."""
    if not _crossing:
        from tests.dryrun.tensors import DEVICE

        tensor, before, calls = torch.zeros(4, device=DEVICE), BOOK.simulation_s, 5000
        start = time.process_time()
        for _ in range(calls):
            tensor.add_(1)
        took, simulated = time.process_time() - start, BOOK.simulation_s - before
        BOOK.simulation_s = before
        _crossing.append((took - simulated) / calls)
    return _crossing[0]


def compare(cases: list[dict[str, Any]], packages: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """All cases and packages in turns, step by step. For each case medians of the host's milliseconds and of their
    ratios, to TorchRec and to the first case, and what the last step did."""
    from rayrec.distributed.vectors import pooled_exchange as vector_exchange
    from tests.dryrun.cases import fake_world
    from tests.dryrun.tensors import Watch

    widths = {case.get("width", DIM) for case in cases}
    vector_exchange.MIN_PIECE_BYTES = vector_exchange.MIN_PIECE_BYTES * min(widths) // DIM  # as many pieces
    BOOK.stage = "build"
    generator = torch.Generator().manual_seed(0)
    with fake_world(max(case["world"] for case in cases)), Watch():
        crossing_s()
        contenders = [[Contender(package, **case) for package in packages] for case in cases]
        gc.disable()
        gc.freeze()
        for _ in range(steps + WARM_UP):
            gc.collect()
            for contender in chain.from_iterable(contenders):
                contender.step(contender.batch(generator))
    for case, of_case in zip(cases, contenders, strict=True):
        answer = case | {each.package: each.seen | {"host_ms": each.median_ms} for each in of_case}
        answer["host_over_first_case"] = [each.over(first) for each, first in zip(of_case, contenders[0], strict=True)]
        if len(of_case) == 2:
            ours, theirs = of_case
            answer["host_ratio"] = ours.over(theirs)
            answer["operators_ratio"] = round(ours.seen["operators"] / theirs.seen["operators"], 3)
        yield answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help='a JSON list of {"world": …, "plan": table_wise|row_wise|column_wise|mixed}')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="rayrec only")
    options = parser.parse_args()
    packages = ["rayrec.torchrec"] if options.alone else ["rayrec.torchrec", "torchrec"]
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    install(packages)
    for answer in compare(json.loads(options.cases), packages, options.steps):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
