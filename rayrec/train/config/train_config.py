"""`TrainConfig`: the frozen, typed, documented description of a training run.

`config.py` of `data`, `models`, `optim`, `distributed/planner` and `checkpoint`, and `trainer.py` here, define the
sections; `checks.py` compares them; `file.py` reads a file and overrides fields.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from rayrec._runtime.strict import Section
from rayrec.checkpoint.config import InitFromConfig, StorageConfig
from rayrec.data.config import DataConfig
from rayrec.data.mapping.schema import Schema
from rayrec.distributed.planner.config import ShardingConfig
from rayrec.models.config import ModelConfig, TableConfig
from rayrec.optim.config import OptimizersConfig
from rayrec.train.config import checks
from rayrec.train.config.removed import without_removed
from rayrec.train.config.trainer import TrainerConfig


class TrainConfig(Section):
    """The config of a run, with the fields of the YAML file.

    Raises:
        pydantic.ValidationError: a field is missing, unknown or invalid. `config.file.load_config` converts it into a
            readable `ConfigError`.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.\-]*$")
    """name of the run and of its folder in `storage.path`"""
    data: DataConfig = Field(description="the data sets to train and evaluate on")
    data_schema: Schema = Field(alias="schema", description="what the columns mean")
    tables: list[TableConfig] = Field(min_length=1, description="embedding tables")
    model: ModelConfig = Field(description="the model")
    optimizers: OptimizersConfig = Field(
        default=OptimizersConfig(), description="optimizers of the dense layers and the tables"
    )
    sharding: ShardingConfig = Field(default=ShardingConfig(), description="how tables are sharded over the workers")
    trainer: TrainerConfig = Field(
        default=TrainerConfig(), description="workers, steps, evaluations and fault handling"
    )
    init_from: InitFromConfig | None = None
    """initial weights; a plain path is short for `{path: …}`"""
    storage: StorageConfig = Field(default=StorageConfig(), description="where the run is stored")

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, raw: Any) -> Any:
        checks.check_secrets(raw)  # first: messages of other checks may contain values
        return without_removed(raw)

    @field_validator("init_from", mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _sections_agree(self) -> TrainConfig:
        checks.check_tables(self.tables, self.data_schema)
        checks.check_named_tables("sharding.constraints", self.sharding.constraints, self.tables)
        checks.check_micro_batches(self.model, self.trainer)
        checks.check_attention(self.model, self.data_schema)
        checks.check_numbers(self.model, self.data_schema)
        checks.check_dlrm(self.model, self.tables, self.data_schema)
        checks.check_esmm(self.model, self.data_schema)
        checks.check_loss(self.model, self.data_schema)
        checks.check_named_tables("optimizers.tables", self.optimizers.tables, self.tables)
        checks.check_metrics(self.trainer, self.data_schema)
        checks.check_slices(self.trainer, self.tables, self.data_schema)
        checks.check_trainer(self.trainer)
        checks.check_labels(self.data_schema, self.trainer, self.storage, self.data)
        checks.check_schedules(self.optimizers, self.trainer, self.data, self.data_schema)
        checks.check_replicas(self.sharding, self.trainer)
        checks.check_data(self.data, self.data_schema)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values as in the YAML file; `TrainConfig(**config.to_dict())` is the same config."""
        return self.model_dump(mode="json", by_alias=True)
