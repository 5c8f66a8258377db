"""What trains on a GPU, on a world of one over NCCL, equals the same on the CPU: number formats, sequences, weight
decay, models with histories, checkpoints in either direction.

`RAYREC_TEST_GPU=1 python -m pytest tests/distributed/test_equality.py` runs other tests with all ranks on one GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.modules.attention import Layout
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
from tests.device import alone_on_gpu
from tests.distributed.embedding_oracle import loss_sum
from tests.distributed.oracle import cut, draw_kjt, targets
from tests.ranks import on_ranks

T = ShardingType
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KINDS = [T.TABLE_WISE, T.ROW_WISE, T.COLUMN_WISE, T.DATA_PARALLEL]
ADAGRAD: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 0.01}
L2: dict[str, Any] = {"weight_decay": 0.1, "weight_decay_mode": "l2"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FP32": ("FP32", ADAGRAD),
    "FP16": ("FP16", ADAGRAD),
    "BF16": ("BF16", ADAGRAD),
    "decay": ("FP32", {**ADAGRAD, **L2}),
    "BF16, row-wise, decay": ("BF16", {**ADAGRAD, **L2, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}),
    "adam, decay": ("FP32", {**ADAGRAD, **L2, "optimizer": EmbOptimType.ADAM}),
    "decoupled": ("FP32", {**ADAGRAD, "weight_decay": 0.1, "weight_decay_mode": "decouple"}),
}
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    with alone_on_gpu("cpu:gloo,cuda:nccl") as group:
        yield group


def tables(sequences: bool, data_type: str = "FP32") -> list[Any]:
    kind: Any = EmbeddingConfig if sequences else EmbeddingBagConfig
    return [
        kind(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=keys, data_type=DataType(data_type))
        for name, rows, dim, keys in (
            ("a", 50, 16, ["f1", "f2"]),
            ("b", 30, 16 if sequences else 32, ["f3"]),
            ("c", 9, 16, ["f4"]),
        )
    ]


def model_of(
    group: dist.ProcessGroup | None,
    device: torch.device,
    kind: ShardingType,
    case: str,
    sequences: bool = False,
    dedup: bool = False,
    seed: int = 1,
) -> DistributedModelParallel:
    data_type, params = CASES[case]
    configs = tables(sequences, data_type)
    module = EmbeddingCollection(configs, seed=seed) if sequences else EmbeddingBagCollection(configs, seed=seed)
    env = ShardingEnv.from_local(1, 0) if group is None else ShardingEnv.from_process_group(group)
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(params, dedup=dedup),
        EmbeddingCollectionSharder(params, dedup=dedup),
    ]
    plan = ShardingPlan({"": {table.name: cut(table, kind, [0]) for table in configs}})
    return DistributedModelParallel(module, env=env, device=device, plan=plan, sharders=sharders)


def train(model: DistributedModelParallel, device: torch.device, steps: range) -> list[torch.Tensor]:
    """The outputs of steps; the batch of a step depends on its number alone."""
    outputs = []
    for number in steps:
        batch = draw_kjt(torch.Generator().manual_seed(number), tables(False), 40, 6)
        out = model(batch.to(device))
        found = out.wait() if hasattr(out, "wait") else out
        if isinstance(found, dict):
            outputs += [jagged.values().detach().float().cpu() for jagged in found.values()]
            total = loss_sum(found) / 40
        else:
            outputs.append(found.values().detach().float().cpu())
            total = targets(found).mean()
        total.backward()
    return outputs


def weights(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    return {name: item.weight.float().cpu().clone() for name, table in model.tables().items() for item in table.local}


def trained(
    group: dist.ProcessGroup | None, device: torch.device, kind: ShardingType, case: str, sequences: bool, dedup: bool
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = model_of(group, device, kind, case, sequences, dedup)
    return train(model, device, range(3)), weights(model)


def compare(found: Any, expected: Any, case: str) -> None:
    # a number of 16 bits is rounded in every step, on a GPU after other sums
    tolerance = {"FP32": 1e-5, "FP16": 4e-3, "BF16": 3e-2}[CASES[case][0]]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.DATA_PARALLEL], ids=lambda kind: kind.value)
def test_number_formats_and_weight_decay(device: str, kind: ShardingType, request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue("nccl") if device == "cuda" else None
    for case in CASES:
        expected = trained(None, CPU, T.ROW_WISE, case, False, False)
        compare(trained(group, torch.device(device), kind, case, False, False), expected, case)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_sequences_and_ids_sent_once(device: str, kind: ShardingType, request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue("nccl") if device == "cuda" else None
    cases = ((True, False), (True, True), (False, True))
    for sequences, dedup in cases if device == "cpu" else cases[:1]:  # one GPU sends no ids
        expected = trained(None, CPU, T.ROW_WISE, "FP32", sequences, False)
        compare(trained(group, torch.device(device), kind, "FP32", sequences, dedup), expected, "FP32")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda", "cpu", marks=needs_gpu),
        pytest.param("cpu", "cuda", marks=needs_gpu),
        pytest.param("cuda", "cuda", marks=needs_gpu),
    ],
)
def test_a_checkpoint_of_one_device_goes_on_on_another(first: str, second: str, request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue("nccl") if "cuda" in (first, second) else None
    if group is None:
        on_ranks(1, goes_on, first, second)
    else:
        goes_on(group, first, second)


def goes_on(group: dist.ProcessGroup, first: str, second: str) -> None:
    for kind in KINDS:
        for case in ("FP32", "BF16", "adam, decay"):
            model = model_of(group, torch.device(first), kind, case)
            train(model, torch.device(first), range(2))
            other = model_of(group, torch.device(second), kind, case, seed=2)
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}
                dcp.save(state, checkpoint_id=folder)
                state = {"model": other.state_dict(), "fused": other.fused_optimizer.state_dict()}
                dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state["model"])
            other.fused_optimizer.load_state_dict(state["fused"])
            assert all(torch.equal(one, weights(model)[name]) for name, one in weights(other).items())
            expected = train(model, torch.device(first), range(2, 4)), weights(model)
            compare((train(other, torch.device(second), range(2, 4)), weights(other)), expected, case)


def encoded(device: torch.device, candidates: bool) -> list[torch.Tensor]:
    """The output and gradients of HSTU over rows of unequal lengths."""
    torch.manual_seed(0)
    config = HSTUConfig(dim=32, max_length=48, heads=2, use_times=not candidates, local=12, prefix=2)
    encoder = HSTUEncoder(config).to(device)
    lengths = torch.tensor([1, 47, 3, 20, 0, 8])
    x = torch.randn(int(lengths.sum()), 32).to(device).requires_grad_()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    times = torch.arange(len(x), device=device) * 977
    items = (lengths - 2).clamp(min=0).to(device) if candidates else None
    out = encoder(x, Layout(offsets, None if candidates else times, total=len(x), items=items))
    (out * torch.linspace(-1, 1, 32, device=device)).square().mean().backward()
    found = [out, x.grad, *(parameter.grad for parameter in encoder.parameters())]
    return [tensor.detach().cpu() for tensor in found if tensor is not None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("candidates", [False, True])
def test_hstu_is_one_function(candidates: bool) -> None:
    torch.testing.assert_close(encoded(GPU, candidates), encoded(CPU, candidates), atol=1e-5, rtol=1e-4)
