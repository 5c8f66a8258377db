"""Settings of an optimizer inside backward, from `fused_params` or from a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.optimizer_rules import RULES, DecayMode, Rule, rule_of

# fbgemm settings with an effect that depends on the plan, and the value that turns them off.
_REFUSED = {
    "gradient_clipping": (
        False,
        "fbgemm clips what reaches a kernel, which depends on the plan; clip in the model, before the loss is averaged",
    ),
    "max_norm": (0.0, "fbgemm limits the norm of a row on a GPU only, and of each column cut separately"),
}
_IGNORED = ("max_gradient",)  # without effect unless gradient_clipping is set


class Replicas(Protocol):
    """Other processes that hold the same rows."""

    @property
    def every_step(self) -> bool:
        """Whether gradients are averaged before each update. Otherwise rows are averaged every few steps."""

    def mean(self, rows: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows `[m]` that any replica touched and their mean gradients, from this replica's `[n, D]`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The update of a table's rows inside backward.

    Args:
        optimizer: The optimizer, by fbgemm's name.
        learning_rate: Learning rate for the loss averaged over the global batch.
        eps: Added to the root of the accumulator.
        beta1, beta2: Decay rates of Adam and LAMB.
        momentum: Momentum of LARS.
        eta: Trust coefficient of LARS.
        weight_decay: Weight decay of the rows that a batch touches.
        weight_decay_mode: "l2" adds decay × weight to the gradient, "decouple" subtracts lr × decay × weight from the
            weight. Default: L2 for SGD and Adagrad, decoupled for Adam. LAMB and LARS follow their papers.
        stochastic_rounding: Rounds 16-bit weights up or down at random, so that small updates are not lost.
        replicas: Other processes with the same rows.
        frozen: Whether backward leaves the rows as they are. Weights of ids still get gradients.

    Raises:
        ValueError: An unknown optimizer, or a mode of weight decay that it does not have.
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
    frozen: bool = False

    def __post_init__(self) -> None:
        modes = self.rule.decay
        if self.weight_decay_mode is not None and self.weight_decay_mode not in modes:
            allowed = " or ".join(repr(mode.value) for mode in modes) or "none: its weight decay has one meaning"
            mode = self.weight_decay_mode.value
            raise ValueError(f"optimizer {self.optimizer.value!r}: weight_decay_mode={mode!r} must be {allowed}")

    @property
    def rule(self) -> Rule:
        """Rule of the optimizer."""
        return rule_of(self.optimizer)

    @property
    def decay_mode(self) -> DecayMode | None:
        """Mode of weight decay. None if weight decay is part of the formula."""
        return self.weight_decay_mode or next(iter(self.rule.decay), None)

    @classmethod
    def from_fused_params(cls, params: Mapping[str, Any] | None) -> OptimizerSpec:
        """From a sharder's `fused_params`.

        Raises:
            ValueError: A setting that does not exist, or that the optimizer does not read.
        """
        settings = {name: value for name, value in (params or {}).items() if name not in _IGNORED}
        for name, (off, reason) in _REFUSED.items():
            if settings.pop(name, off) != off:
                raise ValueError(f"fused_params: {name!r} is not offered: {reason}")
        names = [field.name for field in fields(cls) if field.name not in ("replicas", "frozen")]
        unknown = [name for name in settings if name not in names]
        if unknown:
            raise ValueError(f"fused_params: {unknown[0]!r} is not a setting; there are {names}")
        if "optimizer" in settings:
            settings["optimizer"] = rule_of(settings["optimizer"]).kind
        settings["weight_decay_mode"] = _decay_mode(
            settings.get("weight_decay_mode"), settings.get("weight_decay", 0.0)
        )
        spec = cls(**settings)
        for name in ("momentum", "eta", "beta1", "beta2"):
            if name in settings and name not in spec.rule.reads:
                raise ValueError(f"fused_params: optimizer {spec.optimizer.value!r} has no {name!r}; leave it out")
        return spec

    @classmethod
    def from_torch(cls, optimizer: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> OptimizerSpec:
        """From the class and settings that `apply_optimizer_in_backward` attached to a parameter.

        Raises:
            ValueError: A class or setting without a fused update.
        """
        rule, mode = twin(optimizer)
        defaults = {
            name: parameter.default
            for name, parameter in signature(optimizer).parameters.items()
            if parameter.default is not Parameter.empty
        }
        remaining = {**defaults, **settings}
        spec: dict[str, Any] = {"optimizer": rule.kind, "learning_rate": float(remaining.pop("lr"))}
        spec["weight_decay"] = float(remaining.pop("weight_decay", 0.0))
        spec["weight_decay_mode"] = mode if spec["weight_decay"] else None
        if "betas" in remaining and "beta1" in rule.reads:
            spec["beta1"], spec["beta2"] = remaining.pop("betas")
        read = rule.reads & remaining.keys()
        spec |= {name: float(remaining.pop(name)) for name in sorted(read)}
        unsupported = {name: value for name, value in remaining.items() if value and value != defaults.get(name)}
        if unsupported:
            raise ValueError(
                f"{optimizer.__name__} for embedding tables: the settings {unsupported} have no fused update"
            )
        return cls(**spec)

    def __str__(self) -> str:
        if self.frozen:
            return "frozen"
        return f"{self.optimizer.value}(lr={self.learning_rate})"


FROZEN = OptimizerSpec(learning_rate=0.0, frozen=True)


def _decay_mode(mode: object, weight_decay: float) -> DecayMode | None:
    """The mode from rayrec's enum, fbgemm's enum, or a string.

    Raises:
        ValueError: An unknown mode, or "none" with a weight decay.
    """
    if mode is None:
        return None
    name = str(getattr(mode, "name", mode)).lower()
    if name == "none" and not weight_decay:
        return None
    try:
        return DecayMode(name)
    except ValueError:
        modes = ", ".join(repr(decay_mode.value) for decay_mode in DecayMode)
        raise ValueError(
            f"fused_params: weight_decay_mode={name!r} with weight_decay={weight_decay} is not one of {modes}"
        ) from None


def twin(optimizer: type[torch.optim.Optimizer]) -> tuple[Rule, DecayMode | None]:
    """Rule and mode of weight decay of a torch optimizer, or of an optimizer of rayrec.torchrec.optim."""
    named = getattr(optimizer, "fused_rule", None)  # set by rayrec.torchrec.optim
    if named is not None:
        return rule_of(named), None
    for rule in RULES.values():
        if optimizer in rule.torch:
            return rule, rule.torch[optimizer]
    names = [torch_class.__name__ for rule in RULES.values() for torch_class in rule.torch]
    names += ["RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"]
    raise ValueError(f"{optimizer.__name__} has no fused update for embedding tables; there are {names}")


def optimizer_of(weight: torch.Tensor, default: OptimizerSpec) -> OptimizerSpec:
    """The optimizer set by `apply_optimizer_in_backward` on a table's weight, else the default; `FROZEN` if the weight
    does not require gradients."""
    if not weight.requires_grad:
        return FROZEN
    classes = getattr(weight, "_optimizer_classes", None)
    if not classes:
        return default
    return OptimizerSpec.from_torch(classes[-1], weight._optimizer_kwargs[-1])  # type: ignore[attr-defined]
