"""Tables that are one table to fbgemm are looked up, trained and shown as tables of their own."""

from __future__ import annotations

import torch

from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel import EmbOptimType, FusedKernel, LocalTable, Lookups, OptimizerSpec
from rayrec.distributed.types import Span
from rayrec.modules import EmbeddingBagConfig

DIMS, ROWS = [8, 8, 16, 8, 8], [3, 5, 4, 2, 6]


def local_table(number: int, kind: EmbOptimType) -> LocalTable:
    config = EmbeddingBagConfig(
        name=f"t{number}", num_embeddings=ROWS[number], embedding_dim=DIMS[number], feature_names=[f"f{number}"]
    )
    return LocalTable(
        config=config,
        rows=Span(0, ROWS[number]),
        cols=Span(0, DIMS[number]),
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=OptimizerSpec.from_fused_params({"optimizer": kind, "learning_rate": 0.1}),
    )


def test_stacked_tables_train_as_tables_alone() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    for kind in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        tables = [local_table(number, kind) for number in range(5)]
        together = FusedKernel(tables, [0, 0, 1, 2, 3, 4], cpu)  # the first table is read twice
        alone = [FusedKernel([table], [0] if n else [0, 0], cpu) for n, table in enumerate(tables)]
        for kernel, weight in zip(alone, together.weights(), strict=True):
            weight.copy_(torch.rand(weight.shape, generator=generator))
            kernel.weights()[0].copy_(weight)
        for batch in (2, 0, 3):
            lengths = [torch.randint(0, 3, (batch * (1 if n else 2),), generator=generator) for n in range(5)]
            ids = [torch.randint(0, ROWS[n], (int(lengths[n].sum()),), generator=generator) for n in range(5)]
            pooled = together.pooled(lookups(torch.cat(ids), torch.cat(lengths)))
            expected = [kernel.pooled(lookups(ids[n], lengths[n])) for n, kernel in enumerate(alone)]
            torch.testing.assert_close(pooled, torch.cat(expected, dim=1))
            grad = torch.rand(pooled.shape, generator=generator)
            pooled.backward(grad)
            for part, out in zip(grad.split([part.shape[1] for part in expected], dim=1), expected, strict=True):
                out.backward(part)
        for n, kernel in enumerate(alone):
            torch.testing.assert_close(together.weights()[n], kernel.weights()[0])
            torch.testing.assert_close(together.states()[n], kernel.states()[0])


def lookups(ids: torch.Tensor, lengths: torch.Tensor) -> Lookups:
    return Lookups(ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), None)
