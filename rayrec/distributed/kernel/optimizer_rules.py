"""One `Rule` for each optimizer that can run inside backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType


class DecayMode(str, Enum):
    """Weight decay of touched rows: L2 adds decay × weight to the gradient; DECOUPLE subtracts lr × decay × weight from
    the weight."""

    L2 = "l2"
    DECOUPLE = "decouple"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Properties of one optimizer; its formula is in `optimizer_formulas`.

    Args:
        kind: Name in fbgemm.
        rowwise: States in fbgemm's order: True for one number per row, False for one per element.
        reads: Settings of the formula besides learning rate and weight decay.
        decay: Modes of weight decay, default first. Empty if weight decay is part of the formula.
        fbgemm_decay: Modes that fbgemm's CUDA kernels support.
        fbgemm_on_cpu: Whether fbgemm's CPU kernels support the optimizer, without weight decay.
        torch: torch optimizers with the same update of touched rows, and their mode of weight decay.
    """

    kind: EmbOptimType
    rowwise: Mapping[str, bool] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    decay: tuple[DecayMode, ...] = ()
    fbgemm_decay: frozenset[DecayMode | None] = frozenset()
    fbgemm_on_cpu: bool = False
    torch: Mapping[type[torch.optim.Optimizer], DecayMode] = field(default_factory=dict)

    @property
    def corrects_bias(self) -> bool:
        """Whether the formula reads the number of updates, as for Adam and LAMB."""
        return "beta1" in self.reads

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of state per row, and per element."""
        per_row = sum(self.rowwise.values())
        return 4 * per_row, 4 * (len(self.rowwise) - per_row)


_L2, _DECOUPLE = DecayMode.L2, DecayMode.DECOUPLE
_BETAS = frozenset({"eps", "beta1", "beta2"})

# By name in a config.
RULES: dict[str, Rule] = {
    "sgd": Rule(
        kind=EmbOptimType.EXACT_SGD,
        decay=(_L2, _DECOUPLE),
        fbgemm_on_cpu=True,
        torch={torch.optim.SGD: _L2},
    ),
    "adagrad": Rule(
        kind=EmbOptimType.EXACT_ADAGRAD,
        rowwise={"momentum1": False},
        reads=frozenset({"eps"}),
        decay=(_L2, _DECOUPLE),
        fbgemm_on_cpu=True,
        torch={torch.optim.Adagrad: _L2},
    ),
    "rowwise_adagrad": Rule(
        kind=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        rowwise={"momentum1": True},
        reads=frozenset({"eps"}),
        decay=(_L2, _DECOUPLE),
        fbgemm_decay=frozenset({_L2, _DECOUPLE}),
        fbgemm_on_cpu=True,
    ),
    "adam": Rule(
        kind=EmbOptimType.ADAM,
        rowwise={"momentum1": False, "exp_avg_sq": False},
        reads=_BETAS,
        decay=(_DECOUPLE, _L2),
        fbgemm_decay=frozenset({_DECOUPLE}),
        torch={torch.optim.Adam: _L2, torch.optim.AdamW: _DECOUPLE},
    ),
    "partial_rowwise_adam": Rule(
        kind=EmbOptimType.PARTIAL_ROWWISE_ADAM,
        rowwise={"momentum1": False, "exp_avg_sq": True},
        reads=_BETAS,
        decay=(_DECOUPLE, _L2),
        fbgemm_decay=frozenset({_DECOUPLE}),
    ),
    "lamb": Rule(
        kind=EmbOptimType.LAMB,
        rowwise={"momentum1": False, "exp_avg_sq": False},
        reads=_BETAS,
        fbgemm_decay=frozenset({None}),
    ),
    "partial_rowwise_lamb": Rule(
        kind=EmbOptimType.PARTIAL_ROWWISE_LAMB,
        rowwise={"momentum1": False, "exp_avg_sq": True},
        reads=_BETAS,
        fbgemm_decay=frozenset({None}),
    ),
    "lars_sgd": Rule(
        kind=EmbOptimType.LARS_SGD,
        rowwise={"momentum1": False},
        reads=frozenset({"momentum", "eta"}),
        fbgemm_decay=frozenset({None}),
    ),
}


def rule_of(optimizer: object) -> Rule:
    """Finds a rule by fbgemm's name, as an enum or a string, or by its name in a config.

    Raises:
        ValueError: No rule has this name. Lists the known names.
    """
    name = str(getattr(optimizer, "value", optimizer)).lower()
    for config_name, rule in RULES.items():
        if name in (config_name, f"exact_{config_name}", rule.kind.value):
            return rule
    raise ValueError(f"optimizer {name!r} has no fused update for embedding tables; there are {', '.join(RULES)}")
