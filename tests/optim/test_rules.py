"""The table of optimizer rules is the only one: the config, the planner and fbgemm agree with it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed import EmbeddingComputeKernel, Span
from rayrec.distributed.kernel import RULES, LocalTable, OptimizerSpec, check_trainable, make_pooling_kernel, rule_of
from rayrec.modules import EmbeddingBagConfig
from rayrec.optim.config import SparseOptimizerConfig

TABLE = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=8, feature_names=["f"])


def test_the_config_offers_every_rule() -> None:
    kind = SparseOptimizerConfig.model_fields["kind"].annotation
    assert set(get_args(kind)) == set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_kernel_keeps_the_state_that_the_rule_tells(name: str) -> None:
    rule = RULES[name]
    local = LocalTable(
        config=TABLE,
        rows=Span(0, 5),
        cols=Span(0, 8),
        kernel=EmbeddingComputeKernel.FUSED,
        optimizer=OptimizerSpec(optimizer=rule.kind),
    )
    (state,) = make_pooling_kernel([local], [0], torch.device("cpu")).states()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert shapes == {key: (5,) if per_row else (5, 8) for key, per_row in rule.rowwise.items()}
    row_bytes, element_bytes = rule.state_bytes
    assert sum(value.nbytes for value in state.values()) == 5 * (row_bytes + 8 * element_bytes)


def test_a_rule_is_found_by_every_name() -> None:
    for name, rule in RULES.items():
        assert rule_of(name) is rule_of(rule.kind) is rule_of(rule.kind.value) is rule
    with pytest.raises(ValueError, match=r"'ensemble_row_wise_adagrad' has no fused update .*there are sgd, adagrad"):
        rule_of(EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD)


def test_torch_optimizers_keep_their_defaults_and_their_weight_decay() -> None:
    adam = OptimizerSpec.from_torch(torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2})
    assert (adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.weight_decay_mode) == (0.8, 0.9, 1e-8, 0.2, "l2")
    adamw = OptimizerSpec.from_torch(torch.optim.AdamW, {})
    assert (adamw.learning_rate, adamw.weight_decay, adamw.weight_decay_mode) == (1e-3, 1e-2, "decouple")
    assert OptimizerSpec.from_torch(torch.optim.Adagrad, {}).eps == 1e-10
    with pytest.raises(ValueError, match=r"SGD for embedding tables: the settings {'momentum': 0.9} have no fused"):
        OptimizerSpec.from_torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def test_a_table_in_host_memory_is_refused_where_fbgemm_lacks_the_update() -> None:
    spec = OptimizerSpec(optimizer=EmbOptimType.EXACT_SGD, weight_decay=0.1)
    cuda = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="table 't': kernel 'fused_uvm' trains by fbgemm only"):
        check_trainable(TABLE, EmbeddingComputeKernel.FUSED_UVM, spec, cuda)
    check_trainable(TABLE, EmbeddingComputeKernel.FUSED, spec, cuda)
    check_trainable(TABLE, EmbeddingComputeKernel.FUSED_UVM, OptimizerSpec(), cuda)
    rowwise = OptimizerSpec(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, weight_decay=0.1)
    check_trainable(TABLE, EmbeddingComputeKernel.FUSED_UVM, rowwise, cuda)
