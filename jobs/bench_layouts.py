"""What choosing how tables lie costs: time of the chosen layout over that of the better one (goal ≤ 1.05).

    OMP_NUM_THREADS=1 python jobs/bench_layouts.py

Each kernel chooses by itself as in training (see `kernel/layout_choice.py`); then both layouts run in turns,
forward and backward, and the ratio is the median of those of neighbours, which a busy machine disturbs alike; below 1
it counts as 1. 26 tables of 100,000 × 64, row-wise Adagrad.
"""

from __future__ import annotations

import statistics
import time

import torch

from rayrec.distributed.kernel import EmbOptimType, FusedKernel, LocalTable, Lookups, OptimizerSpec
from rayrec.distributed.kernel.layout_choice import MOST_ROUNDS, WARM_UP
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Span
from rayrec.modules import EmbeddingBagConfig

TABLES, ROWS, DIM, TURNS = 26, 100_000, 64, 120


def table(number: int) -> LocalTable:
    return LocalTable(
        config=EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{number}"]
        ),
        rows=Span(0, ROWS),
        cols=Span(0, DIM),
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=OptimizerSpec.from_fused_params(
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
        ),
    )


def draw(count: int, skewed: bool) -> torch.Tensor:
    """Ids of all tables, uniform, or frequent in proportion to rank ** -1.05."""
    uniform = torch.rand(TABLES * count, dtype=torch.float64)
    if not skewed:
        return (uniform * ROWS).long()
    return ((1 - uniform * (1 - ROWS**-0.05)) ** -20 - 1).long().clamp(max=ROWS - 1)


def measure(bags: int, length: int, skewed: bool) -> str:
    """A line: ids of a table and step, what was chosen, and the time of it over that of the better layout."""
    kernel = FusedKernel([table(number) for number in range(TABLES)], range(TABLES), torch.device("cpu"))
    offsets = torch.arange(TABLES * bags + 1) * length
    grad = torch.rand(bags, TABLES * DIM)

    def step() -> float:
        lookups = Lookups(draw(bags * length, skewed), offsets, None)
        start = time.perf_counter()
        kernel.pooled(lookups).backward(grad)
        return time.perf_counter() - start

    for _ in range(2 * (WARM_UP + MOST_ROUNDS)):
        step()
    size = (TABLES * bags * length).bit_length()
    chosen = kernel._choice._chosen[size]
    times: list[list[float]] = [[], []]
    for turn in range(2 * TURNS):
        kernel._choice._chosen[size] = turn % 2
        times[turn % 2].append(step())
    ratio = statistics.median(mine / other for mine, other in zip(times[chosen], times[1 - chosen], strict=True))
    ids = "power law" if skewed else "uniform"
    return f"| {ids} | {bags} × {length} | {('apart', 'as one')[chosen]} | {max(1.0, ratio):.2f} |"


def main() -> None:
    torch.set_num_threads(1)
    print("| ids | bags × ids of a table | chosen | its time / the better one's |\n|---|---|---|---|")
    for skewed in (False, True):
        for bags, length in ((16, 1), (64, 1), (256, 1), (1024, 1), (1024, 10)):
            print(measure(bags, length, skewed), flush=True)


if __name__ == "__main__":
    main()
