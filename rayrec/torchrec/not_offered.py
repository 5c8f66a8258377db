"""Modules and names of TorchRec that rayrec does not have: importing one raises an error with the alternative."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_EXCHANGES = "write the model's own exchanges with torch.distributed.nn; the collections have theirs inside"
_COLLISIONS = (
    "rayrec.torchrec.modules.mc_modules has managed collisions; DistributedModelParallel shards the tables behind them"
)
_INFERENCE = "`rayrec export` and rayrec.inference.Model; rayrec.quant has the quantized collections"
_CACHE = "fused_uvm_caching keeps hot rows on the device; there is no other store of rows"

MODULES = {
    **dict.fromkeys(("mc_adapter", "hash_mc_modules", "hash_mc_evictions"), _COLLISIONS),
    "embedding_tower": "a tower is a module of your own that holds a collection; DistributedModelParallel finds it",
    "tensor_pool": _CACHE,
    "keyed_jagged_tensor_pool": _CACHE,
}
MODULES = {f"rayrec.torchrec.modules.{name}": text for name, text in MODULES.items()} | {
    **dict.fromkeys((f"rayrec.torchrec.distributed.{name}" for name in ("comm_ops", "dist_data")), _EXCHANGES),
    **dict.fromkeys(
        (f"rayrec.torchrec.distributed.{name}" for name in ("mc_modules", "mc_embedding", "mc_embeddingbag")),
        _COLLISIONS,
    ),
    **dict.fromkeys(
        (
            f"rayrec.torchrec.distributed.{name}"
            for name in ("quant_embedding", "quant_embeddingbag", "quant_embedding_kernel")
        ),
        _INFERENCE,
    ),
    "rayrec.torchrec.distributed.fp_embeddingbag": (
        "DistributedModelParallel shards the collection inside; no sharder of its own is needed"
    ),
    "rayrec.torchrec.metrics.gauc": "rayrec.metrics.GroupedAuc, exact over batches and ranks",
    "rayrec.torchrec.metrics.output": "RecMetricEnum.SCALAR of a task whose label is that output",
    "rayrec.torchrec.metrics.hindsight_target_pr": "RecMetricEnum.PRECISION and RECALL with a threshold",
    "rayrec.torchrec.metrics.multi_label_precision": "a task for each label, with RecMetricEnum.PRECISION",
    **dict.fromkeys(
        (f"rayrec.torchrec.metrics.{name}" for name in ("cpu_offloaded_metric_module", "cpu_comms_metric_module")),
        "rayrec.torchrec.metrics.metric_module.RecMetricModule; one all-reduce adds all of its sums up",
    ),
    **dict.fromkeys((f"rayrec.torchrec.inference.{name}" for name in ("modules", "state_dict_transform")), _INFERENCE),
    "rayrec.torchrec.quant.embedding_modules": _INFERENCE,
}


class NotOffered(ModuleNotFoundError):
    """A module or name of TorchRec that rayrec does not have; the message names the alternative."""


def without(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: its `__name__`.
        instead: for each name, what to use.
    """

    def missing(name: str) -> NoReturn:
        if name in instead:
            raise NotOffered(f"{module} has no {name}: {instead[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


class _Finder:
    """Last in `sys.meta_path`: raises NotOffered for modules of TorchRec that no other finder has found."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name in MODULES:
            raise NotOffered(f"there is no {name}: {MODULES[name]}", name=name)


def install() -> None:
    """Makes the import of a module that is not offered raise NotOffered."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
