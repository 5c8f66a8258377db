"""Training runs: the config, the driver, the workers' loop, recovery, and what is kept of a run.

Models, sharding, data and metrics have packages of their own; this one only puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec.train.errors import Interrupted, ResourceError, StorageError, TrainError

if TYPE_CHECKING:
    from rayrec.train.config import TrainConfig
    from rayrec.train.config.file import ConfigError, load_config
    from rayrec.train.driver.callbacks import Callback, RunInfo
    from rayrec.train.run.result import Result
    from rayrec.train.trainer import Trainer

# Read when first used: a report or a config reference needs neither torch's compilers nor Ray.
_WHERE = {
    "Callback": "driver.callbacks",
    "ConfigError": "config.file",
    "Result": "run.result",
    "RunInfo": "driver.callbacks",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "load_config": "config.file",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = [
    "Callback",
    "ConfigError",
    "Interrupted",
    "ResourceError",
    "Result",
    "RunInfo",
    "StorageError",
    "TrainConfig",
    "TrainError",
    "Trainer",
    "load_config",
]
