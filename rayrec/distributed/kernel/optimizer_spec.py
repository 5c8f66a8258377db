"""The settings of an optimizer inside backward, from `fused_params` or from a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.optimizer_rules import RULES, DecayMode, Rule, rule_of

# settings of fbgemm with an effect that depends on the plan, and the value that turns them off
_REFUSED = {
    "gradient_clipping": (
        False,
        "fbgemm clips what reaches a kernel, which depends on the plan; clip in the model, before the loss is averaged",
    ),
    "max_norm": (0.0, "fbgemm limits the norm of a row on a GPU only, and of each column cut separately"),
}
_IGNORED = ("max_gradient",)  # has no effect without gradient_clipping


class Replicas(Protocol):
    """Other processes that hold the same rows."""

    @property
    def every_step(self) -> bool:
        """Gradients are averaged before each update; else rows are averaged after some steps."""

    def mean(self, rows: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows `[m]` that any replica touched, and their mean gradients, from this one's `[n, D]`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The update of a table's rows inside backward.

    Args:
        optimizer: the rule, as fbgemm names it.
        learning_rate: in units of the loss averaged over the global batch.
        eps: added to the root of the accumulator.
        beta1, beta2: Adam's and LAMB's decay rates.
        momentum: of LARS.
        eta: LARS's trust coefficient.
        weight_decay: of the rows that a batch touches.
        weight_decay_mode: "l2" adds decay × weight to the gradient, "decouple" subtracts lr × decay × weight from the
            weight; by default L2 for SGD and Adagrad and decoupled for Adam. LAMB's and LARS's is as in their papers.
        stochastic_rounding: round 16-bit weights up or down at random, so that small updates are not lost.
        replicas: other processes with the same rows; None without any.

    Raises:
        ValueError: an unknown optimizer, or a weight decay that it does not have.
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0
    weight_decay_mode: DecayMode | None = None
    stochastic_rounding: bool = False
    replicas: Replicas | None = None

    def __post_init__(self) -> None:
        modes = self.rule.decay
        if self.weight_decay_mode is not None and self.weight_decay_mode not in modes:
            known = " or ".join(repr(mode.value) for mode in modes) or "none: its weight decay has one meaning"
            mode = self.weight_decay_mode.value
            raise ValueError(f"optimizer {self.optimizer.value!r}: weight_decay_mode={mode!r} must be {known}")

    @property
    def rule(self) -> Rule:
        """The rule of the optimizer."""
        return rule_of(self.optimizer)

    @property
    def decay_mode(self) -> DecayMode | None:
        """The mode of weight decay; None where it is part of the formula."""
        return self.weight_decay_mode or next(iter(self.rule.decay), None)

    @classmethod
    def from_fused_params(cls, params: Mapping[str, Any] | None) -> OptimizerSpec:
        """From a sharder's `fused_params`.

        Raises:
            ValueError: a setting that does not exist, or that the optimizer does not read.
        """
        given = {name: value for name, value in (params or {}).items() if name not in _IGNORED}
        for name, (off, why) in _REFUSED.items():
            if given.pop(name, off) != off:
                raise ValueError(f"fused_params: {name!r} is not offered: {why}")
        known = [field.name for field in fields(cls) if field.name != "replicas"]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"fused_params: {unknown[0]!r} is not a setting; there are {known}")
        if "optimizer" in given:
            given["optimizer"] = rule_of(given["optimizer"]).kind
        given["weight_decay_mode"] = _decay_mode(given.get("weight_decay_mode"), given.get("weight_decay", 0.0))
        spec = cls(**given)
        for name in ("momentum", "eta", "beta1", "beta2"):
            if name in given and name not in spec.rule.reads:
                raise ValueError(f"fused_params: optimizer {spec.optimizer.value!r} has no {name!r}; leave it out")
        return spec

    @classmethod
    def from_torch(cls, optimizer: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> OptimizerSpec:
        """From the class and settings that `apply_optimizer_in_backward` put on a parameter.

        Raises:
            ValueError: a class or setting without a fused update.
        """
        rule, mode = twin(optimizer)
        defaults = {
            name: parameter.default
            for name, parameter in signature(optimizer).parameters.items()
            if parameter.default is not Parameter.empty
        }
        left = {**defaults, **settings}
        spec: dict[str, Any] = {"optimizer": rule.kind, "learning_rate": float(left.pop("lr"))}
        spec["weight_decay"] = float(left.pop("weight_decay", 0.0))
        spec["weight_decay_mode"] = mode if spec["weight_decay"] else None
        if "betas" in left and "beta1" in rule.reads:
            spec["beta1"], spec["beta2"] = left.pop("betas")
        read = rule.reads & left.keys()
        spec |= {name: float(left.pop(name)) for name in sorted(read)}
        odd = {name: value for name, value in left.items() if value and value != defaults.get(name)}
        if odd:
            raise ValueError(f"{optimizer.__name__} for embedding tables: the settings {odd} have no fused update")
        return cls(**spec)

    def __str__(self) -> str:
        return f"{self.optimizer.value}(lr={self.learning_rate})"


def _decay_mode(given: object, weight_decay: float) -> DecayMode | None:
    """The mode, from rayrec's enum, fbgemm's, or a string.

    Raises:
        ValueError: an unknown mode, or "none" with a weight decay.
    """
    if given is None:
        return None
    name = str(getattr(given, "name", given)).lower()
    if name == "none" and not weight_decay:
        return None
    try:
        return DecayMode(name)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in DecayMode)
        raise ValueError(
            f"fused_params: weight_decay_mode={name!r} with weight_decay={weight_decay} is not one of {known}"
        ) from None


def twin(optimizer: type[torch.optim.Optimizer]) -> tuple[Rule, DecayMode | None]:
    """The rule of a torch optimizer, or of one in rayrec.torchrec.optim, and its mode of weight decay."""
    named = getattr(optimizer, "fused_rule", None)  # set by rayrec.torchrec.optim
    if named is not None:
        return rule_of(named), None
    for rule in RULES.values():
        if optimizer in rule.torch:
            return rule, rule.torch[optimizer]
    known = [twin.__name__ for rule in RULES.values() for twin in rule.torch]
    known += ["RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"]
    raise ValueError(f"{optimizer.__name__} has no fused update for embedding tables; there are {known}")
