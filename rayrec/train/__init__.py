"""Training runs: config, driver, worker loop, recovery, run folder. `README.md` shows how they fit together.

Models, sharding, data and metrics are separate packages; this package combines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.train.errors import Interrupted, ResourceError, StorageError, TrainError

if TYPE_CHECKING:
    from rayrec.train.after.evaluate import evaluate_run
    from rayrec.train.after.export import export_run
    from rayrec.train.after.index import index_run
    from rayrec.train.config.file import ConfigError, load_config, parse_config
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.driver.callbacks import Callback, RunInfo
    from rayrec.train.driver.console import Display
    from rayrec.train.report import write_report
    from rayrec.train.run.folder import RunFolder
    from rayrec.train.run.result import Result
    from rayrec.train.trainer import Trainer

# Imported on first use: a report or a config reference needs neither torch's compilers nor Ray.
__getattr__ = lazy_names(__name__)

__all__ = [
    "Callback",
    "ConfigError",
    "Display",
    "Interrupted",
    "ResourceError",
    "Result",
    "RunFolder",
    "RunInfo",
    "StorageError",
    "TrainConfig",
    "TrainError",
    "Trainer",
    "evaluate_run",
    "export_run",
    "index_run",
    "load_config",
    "parse_config",
    "write_report",
]
