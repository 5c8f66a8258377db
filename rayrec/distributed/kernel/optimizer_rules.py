"""Every optimizer that can run inside backward: one `Rule` each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType


class DecayMode(str, Enum):
    """How weight decay acts on the touched rows: L2 adds decay × weight to the gradient; DECOUPLE subtracts lr × decay
    × weight from the weight."""

    L2 = "l2"
    DECOUPLE = "decouple"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is known about one optimizer; its formula is in `optimizer_formulas`.

    Args:
        kind: fbgemm's name for it.
        rowwise: its states in fbgemm's order; True for one number a row, False for one an element.
        reads: settings in the formula, besides the learning rate and weight decay.
        decay: modes of weight decay, the default first; none where it is part of the formula.
        fbgemm_decay: those of them that fbgemm's CUDA kernels support.
        fbgemm_on_cpu: fbgemm's CPU kernels support it, without weight decay.
        torch: torch's optimizers that make the same update of the touched rows, with their mode of weight decay.
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
        """Whether the formula reads the number of updates so far, as Adam's and LAMB's do."""
        return "beta1" in self.reads

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of state for each row, and for each element."""
        per_row = sum(self.rowwise.values())
        return 4 * per_row, 4 * (len(self.rowwise) - per_row)


_L2, _DECOUPLE = DecayMode.L2, DecayMode.DECOUPLE
_BETAS = frozenset({"eps", "beta1", "beta2"})

# by the name in a config
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
    """The rule by fbgemm's name, as an enum or a string, or by the name in a config.

    Raises:
        ValueError: there is no such rule; lists the known ones.
    """
    name = str(getattr(optimizer, "value", optimizer)).lower()
    for known, rule in RULES.items():
        if name in (known, f"exact_{known}", rule.kind.value):
            return rule
    raise ValueError(f"optimizer {name!r} has no fused update for embedding tables; there are {', '.join(RULES)}")
