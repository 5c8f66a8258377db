"""What a fused optimizer is: a frozen spec, read from `fused_params` or from a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

# spec field for each setting of a torch optimizer; the rest of its settings must keep their defaults
_FROM_TORCH: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The update that a table's rows receive inside backward.

    Args:
        optimizer: the rule, as fbgemm names it.
        learning_rate: in units of the loss averaged over the global batch.
        eps: added to the root of the accumulator.
        beta1, beta2: Adam's and LAMB's decay rates.
        momentum: of LARS.
        eta: LARS's trust coefficient.
        weight_decay: L2, added to the gradient of the rows that a batch touches.
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0

    @classmethod
    def from_fused_params(cls, params: Mapping[str, Any] | None) -> OptimizerSpec:
        """From a sharder's `fused_params`.

        Raises:
            ValueError: a setting that does not exist, with those that do.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in params or {} if name not in known]
        if unknown:
            raise ValueError(f"fused_params: {unknown[0]!r} is not a setting; there are {known}")
        return cls(**dict(params or {}))

    @classmethod
    def from_torch(cls, optimizer: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> OptimizerSpec:
        """From the class and settings that `apply_optimizer_in_backward` left on a parameter.

        Raises:
            ValueError: a class or setting that no fused update stands for.
        """
        named = getattr(optimizer, "fused_rule", None)  # rayrec.optim's own, which know nothing of fbgemm
        rule = _FROM_TORCH.get(optimizer) if named is None else EmbOptimType(named)
        if rule is None:
            known = [c.__name__ for c in _FROM_TORCH] + ["RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "LarsSGD"]
            raise ValueError(f"{optimizer.__name__} has no fused update for embedding tables; there are {known}")
        spec = dict(settings)
        out: dict[str, Any] = {"optimizer": rule, "learning_rate": float(spec.pop("lr", _default_lr(rule)))}
        out["eps"] = float(spec.pop("eps", 1e-10 if rule == EmbOptimType.EXACT_ADAGRAD else 1e-8))
        out["weight_decay"] = float(spec.pop("weight_decay", 0.0))
        if "betas" in spec:
            out["beta1"], out["beta2"] = spec.pop("betas")
        if rule == EmbOptimType.LARS_SGD:
            out["momentum"] = float(spec.pop("momentum", 0.9))
            out["eta"] = float(spec.pop("eta", 0.001))
        left = {name: value for name, value in spec.items() if value}
        if left:
            raise ValueError(f"{optimizer.__name__} for embedding tables: the settings {left} have no fused update")
        return cls(**out)

    def __str__(self) -> str:
        return f"{self.optimizer.value}(lr={self.learning_rate})"


def _default_lr(rule: EmbOptimType) -> float:
    return 1e-2 if rule == EmbOptimType.EXACT_ADAGRAD else 1e-3


# fbgemm's CPU kernels train with these; the row kernel serves the others there
FUSED_ON_CPU = frozenset({EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD})
