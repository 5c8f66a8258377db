"""Names of torch and fbgemm that are not public, or are about to go, and that the engine needs: an upgrade that takes
one away fails here by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
from torch.distributed import optim as distributed_optim
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import EmbeddingComputeKernel, Span
from rayrec.distributed.kernel import LocalTable, OptimizerSpec
from rayrec.distributed.kernel.tbe import make_tbe
from rayrec.modules import EmbeddingBagConfig
from tests.ranks import GROUP_TIMEOUT_S, on_ranks


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "owner, name, needed",
    [
        (
            ShardedTensor,
            "_init_from_local_shards_and_global_metadata",
            ["local_shards", "sharded_tensor_metadata", "process_group"],
        ),
        (DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", ["module"]),
        (distributed_optim, "_apply_optimizer_in_backward", ["optimizer_class", "params", "optimizer_kwargs"]),
        (tbe, "SplitTableBatchedEmbeddingBagsCodegen", ["embedding_specs", "feature_table_map", "bounds_check_mode"]),
    ],
)
def test_a_function_has_the_arguments_that_we_pass(owner: Any, name: str, needed: list[str]) -> None:
    assert hasattr(owner, name), f"{owner.__name__}.{name} is gone"
    assert not set(needed) - set(parameters(getattr(owner, name))), f"{owner.__name__}.{name} has other arguments"


@pytest.mark.parametrize("optimizer, memory", [("sgd", 1), ("rowwise_adagrad", 2), ("adagrad", 2)])
def test_a_tbe_on_a_cpu_holds_its_memory_under_the_names_that_loops_use(optimizer: str, memory: int) -> None:
    table = LocalTable(
        config=EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"]),
        rows=Span(0, 5),
        cols=Span(0, 4),
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=OptimizerSpec.from_fused_params({"optimizer": optimizer}),
    )
    made = make_tbe([table], [0], torch.device("cpu"), 1.0)
    for name in ("weights_host", "momentum1_host")[:memory]:
        assert isinstance(getattr(made, name, None), torch.Tensor), f"TBE.{name} is gone"
    (weight,) = made.split_embedding_weights()
    assert weight.untyped_storage().data_ptr() == made.weights_host.untyped_storage().data_ptr()
    states = [tensor for tensors in made.split_optimizer_states() for tensor in tensors]
    assert all(s.untyped_storage().data_ptr() == made.momentum1_host.untyped_storage().data_ptr() for s in states)
    for name in ("flush", "reset_cache_states", "get_learning_rate", "set_learning_rate", "iter", "iter_cpu"):
        assert hasattr(made, name), f"TBE.{name} is gone"


def test_onednn_multiplies_by_the_operator_that_linear_layers_call() -> None:
    left, right, bias = torch.rand(3, 4), torch.rand(5, 4), torch.rand(5)
    product = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    torch.testing.assert_close(product, left @ right.T + bias)


def timeout(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_group_tells_its_timeout() -> None:
    assert on_ranks(2, timeout) == [GROUP_TIMEOUT_S] * 2
