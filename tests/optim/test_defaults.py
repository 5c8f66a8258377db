"""What optimizers around others do where nothing is said: TorchRec's settings."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from rayrec.optim import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from rayrec.torchrec.optim.semi_sync import SemisyncOptimizer
from rayrec.torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage, factor


def defaults(call: Any) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


def test_settings_by_default_are_torchrecs() -> None:
    assert defaults(WarmupStage) == {
        "policy": WarmupPolicy.LINEAR,
        "max_iters": 1,
        "value": 1.0,
        "lr_scale": 1.0,
        "decay_iters": -1,
        "sgdr_period": 1,
        "start_interpolating_iters": None,
        "end_value": None,
    }
    assert defaults(WarmupOptimizer) == {"lr": 0.1, "lr_param": "lr", "param_name": "__warmup"}
    assert defaults(GradientClippingOptimizer) == {
        "clipping": GradientClipping.NONE,
        "max_gradient": 0.1,
        "norm_type": 2.0,
        "enable_global_grad_clip": False,
        "param_to_pgs": None,
        "track_grad_norm": False,
    }
    assert defaults(SemisyncOptimizer) == {
        "num_local_steps": 16,
        "semi_sync_worker_shard_group": None,
        "offload_global_model": False,
        "non_blocking": False,
    }
    assert {policy.name: policy.value for policy in WarmupPolicy} == {
        "NONE": "none",
        "CONSTANT": "constant",
        "LINEAR": "linear",
        "POLY": "poly",
        "STEP": "step",
        "INVSQRT": "inv_sqrt",
        "COSINE_ANNEALING_WARM_RESTARTS": "cosine_annealing_warm_restarts",
        "INTERPOLATE": "interpolate",
    }
    assert [(kind.name, kind.value) for kind in GradientClipping] == [
        ("NORM", "norm"),
        ("VALUE", "value"),
        ("NONE", "none"),
    ]


def test_the_ends_of_a_schedule() -> None:
    """The last iteration of a stage is its own; after the last stage the rate is the one that was given."""
    stages = [WarmupStage(WarmupPolicy.CONSTANT, 2, 0.5), WarmupStage(WarmupPolicy.CONSTANT, 3, 0.25, lr_scale=3.0)]
    assert [factor(stages, iteration) for iteration in range(5)] == [0.5, 0.5, 0.5, 0.75, 1.0]
    assert [factor([], iteration) for iteration in range(2)] == [1.0, 1.0]
    WarmupStage(WarmupPolicy.POLY, max_iters=4, decay_iters=4)
    WarmupStage(WarmupPolicy.POLY, max_iters=4, decay_iters=0)
    with pytest.raises(ValueError, match="decay_iters=3 ends before max_iters=4; make it at least as large"):
        WarmupStage(WarmupPolicy.POLY, max_iters=4, decay_iters=3)
    param = torch.nn.Parameter(torch.zeros(1))
    inner = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=7.0))
    with pytest.raises(ValueError, match=r"max_iters of the warmup stages must increase; they are \[2, 2\]"):
        WarmupOptimizer(inner, [WarmupStage(max_iters=2), WarmupStage(max_iters=2)])
    warm = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.CONSTANT, 1, 0.5)])
    rates = []
    for _ in range(3):
        rates.append(warm.param_groups[0]["lr"])
        param.grad = torch.ones(1)
        warm.step()
    assert rates == [0.05, 0.05, 0.1] and warm.iteration == 3
    assert float(param.detach()) == pytest.approx(-0.2)
