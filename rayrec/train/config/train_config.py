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
from rayrec.train.config.dynamic_ids import check_dynamic
from rayrec.train.config.joins import with_joins
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
        return with_joins(without_removed(raw))

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
        checks.check_item_features(self.model, self.data_schema)
        checks.check_esmm(self.model, self.data_schema)
        checks.check_loss(self.model, self.data_schema)
        checks.check_named_tables("optimizers.tables", self.optimizers.tables, self.tables)
        checks.check_metrics(self.trainer, self.data_schema)
        checks.check_slices(self.trainer, self.tables, self.data_schema)
        checks.check_ranking(self.model, self.data_schema, self.trainer)
        checks.check_trainer(self.trainer)
        checks.check_labels(self.model, self.data_schema, self.trainer, self.storage, self.data)
        checks.check_schedules(self.optimizers, self.trainer, self.data, self.data_schema, self.model)
        check_dynamic(self.tables, self.data_schema, self.sharding, self.trainer)
        checks.check_replicas(self.sharding, self.trainer)
        checks.check_data(self.data, self.data_schema)
        return self

    @property
    def row_schema(self) -> Schema:
        """The schema without the features that rows do not have: `item_features` of `sasrec` and `hstu`, whose rows
        have lists of items."""
        if self.model.name not in checks.READ_A_HISTORY_ONLY:
            return self.data_schema
        schema, names = self.data_schema, self.model.args.get("item_features", ())
        sparse = [feature for feature in schema.sparse if feature.name not in names]
        dense = [feature for feature in schema.dense if feature.name not in names]
        return schema.model_copy(update={"sparse": sparse, "dense": dense})

    @property
    def training_schema(self) -> Schema:
        """The columns that training reads."""
        schema = self.row_schema.for_training
        return schema.model_copy(update={"group": self.data_schema.group}) if self.model.loss.by_group else schema

    @property
    def evaluation_schema(self) -> Schema:
        """The columns that evaluations read. Histories of `sasrec` and `hstu` are not cut, as all seen items are left
        out of the ranking."""
        if self.model.name not in checks.READ_A_HISTORY_ONLY:
            return self.data_schema
        schema, history = self.row_schema, self.model.args["history"]
        whole = {name for sequence in schema.sequences for name in sequence.ids if history in sequence.ids}
        whole |= {one.name for one in schema.sparse if one.name == history and one.keep == "last"}
        sparse = [one.model_copy(update={"max_length": None}) if one.name in whole else one for one in schema.sparse]
        sequences = [one.model_copy(update={"length": None}) if history in one.ids else one for one in schema.sequences]
        return schema.model_copy(update={"sparse": sparse, "sequences": sequences})

    def to_dict(self) -> dict[str, Any]:
        """Plain values as in the YAML file; `TrainConfig(**config.to_dict())` is the same config."""
        return self.model_dump(mode="json", by_alias=True)
