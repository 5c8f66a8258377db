"""The sections `tables` and `model` of a train config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, SerializeAsAny, Tag, ValidationInfo, field_validator, model_validator

from rayrec._runtime.strict import Section, refusal
from rayrec.models import BUILT_IN, RETRIEVERS
from rayrec.models.arguments import args_of, wrong_args
from rayrec.models.loss_config import LossConfig, default_loss, loss_of
from rayrec.storage.errors import suggestion


class VectorsConfig(Section):
    """Initial rows of a table, from one vector per id in Parquet files. Rows of other ids start at random."""

    path: str = Field(min_length=1, description="Parquet file, folder or glob; a path or URI")
    id: str = Field(min_length=1, description="column of the ids, as the training data has them")
    vector: str = Field(min_length=1, description="column of the vectors: lists of `dim` floats")
    feature: str | None = None
    """feature of the table whose mapping gives the row of an id; needed if its features map ids differently"""


def _kind_of_init(init: Any) -> str:
    return "(bound)" if isinstance(init, int | float) else "(vectors)"


# With tags, the error of a wrong field does not name what the other form needs. No field may have the name of a tag.
Init = Annotated[
    Annotated[float, Field(gt=0), Tag("(bound)")] | Annotated[VectorsConfig, Tag("(vectors)")],
    Discriminator(_kind_of_init),
]


class TableConfig(Section):
    """One embedding table."""

    name: str = Field(min_length=1, description="unique name of the table")
    rows: int = Field(ge=1, description="rows of the table; ids map to `[0, rows)`")
    dim: int = Field(ge=1, description="width of a row")
    features: list[str] = Field(min_length=1, description="sparse features that look up this table")
    pooling: Literal["sum", "mean"] = Field(
        default="sum", description="how to pool the vectors of an id list; `two_tower` takes means"
    )
    data_type: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="number format of the weights")
    init: Init | None = None
    """number: initial weights are uniform in ±init; `null`: ±sqrt(1 / rows), and in `sasrec`, `hstu` and `two_tower`
    normal with a deviation of 0.02; section: rows start from vectors in files"""

    @property
    def vectors(self) -> VectorsConfig | None:
        """The files that the table starts from; None if all rows start at random."""
        return self.init if isinstance(self.init, VectorsConfig) else None

    @model_validator(mode="after")
    def _has_the_feature_of_its_vectors(self) -> TableConfig:
        feature = None if self.vectors is None else self.vectors.feature
        if feature is not None and feature not in self.features:
            raise refusal(
                f"tables.{self.name}.init.feature",
                f"table {self.name!r} does not have feature {feature!r}{suggestion(feature, self.features)} "
                f"(features: {', '.join(self.features)})",
            )
        return self

    @model_validator(mode="after")
    def _reads_a_feature_once(self) -> TableConfig:
        repeated = [feature for feature, times in Counter(self.features).items() if times > 1]
        if repeated:
            raise refusal(
                f"tables.{self.name}.features", f"table {self.name!r}: feature {repeated[0]!r} is listed twice"
            )
        return self


class ModelConfig(Section):
    """A built-in model by name, or your own by import path."""

    name: str | None = None
    """built-in model, e.g. `dlrm`; omit it if you set `factory`"""
    factory: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, called as `function(tables=…, num_dense=…, device=…, **args)`; returns an `nn.Module`
    whose `model(batch)` returns `loss, logits`"""
    args: dict[str, Any] = Field(default={})
    """arguments of the model, e.g. `dense_arch`, `over_arch`"""
    loss: SerializeAsAny[LossConfig] = Field(default=None, validate_default=True)
    """the loss; a plain kind is short for `{kind: …}`; `null`: `bce` for rankers, `in_batch` for `two_tower`,
    `sampled_softmax` for `sasrec` and `hstu`. Applies to built-in models, to your own retrievers, and to your own
    rankers if they end with `rayrec.models.Head`"""

    @field_validator("loss", mode="before")
    @classmethod
    def _of_kind(cls, given: Any, info: ValidationInfo) -> Any:
        name = None if info.data.get("factory") is not None else info.data.get("name")
        if given is None:
            return default_loss(name, RETRIEVERS)
        given = {"kind": given} if isinstance(given, str) else given
        return loss_of(given, name, RETRIEVERS) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.name is not None and self.factory is not None:
            raise ValueError("set `name` (a built-in model) or `factory` (your own), not both")
        return self

    @model_validator(mode="after")
    def _accepts_its_args(self) -> ModelConfig:
        if self.name not in BUILT_IN:
            return self
        name, accepted = self.name, list(args_of(self.name).model_fields)
        for arg, kind, text in wrong_args(name, self.args):
            match kind:
                case "extra_forbidden":
                    hint = suggestion(arg, accepted)
                    text = f"model {name} does not accept it{hint} (accepted: {', '.join(accepted)})"
                case "missing":
                    text = f"model {name} requires it (accepted: {', '.join(accepted)})"
                case _:
                    text = f"model {name}: {text[0].lower()}{text[1:]}"
            raise refusal(f"model.args.{arg}", text)
        return self
