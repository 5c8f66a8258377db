"""What a data set's columns mean: label, dense features, sparse features, and how ids become table rows.

A schema is part of the train config and says nothing about files; whether files fit it is checked in `columns.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rayrec.data.mapping.derived.specs import Derived, check_order, needed, sources
from rayrec.data.mapping.rules import Identity, IdMapping, LabelKind, LabelRule, Vocabulary
from rayrec.data.mapping.sequences import SequenceColumns
from rayrec.data.mapping.transforms import Transform
from rayrec.data.strict import Strict

IdType = Literal["text", "integer"]


class Label(LabelRule):
    """The column that is predicted."""

    column: str = "label"


class SampleWeight(Strict):
    """A number of at least 0 that says how much a row counts, in the loss and in every figure."""

    column: str = "weight"


class Group(Strict):
    """Whom a row belongs to (a user, a request): evaluations then also give the mean AUC inside groups, GAUC."""

    column: str = "group"


class Timestamp(Strict):
    """When a row happened: evaluations then also give their figures by stretches of time (UTC).

    Args:
        unit: of integers, counted from 1970; Arrow's timestamps and dates have units of their own.
        bucket: how long the stretches are.
    """

    column: str = "timestamp"
    unit: Literal["s", "ms", "us", "ns"] = "s"
    bucket: Literal["hour", "day", "week"] = "day"


class _Feature(Strict):
    """What every feature has; `column` is the feature's name where none is given."""

    name: str = Field(min_length=1)
    column: str = Field(default="", min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _column_defaults_to_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" in data and data.get("column") is None:
            return {**data, "column": data["name"]}
        return data


class Task(LabelRule, _Feature):
    """One of several labels: a column that is predicted under a name.

    Args:
        weight: of its loss in the sum of all labels' losses.
        on_null: "error" reports a null; with "ignore" the label was not observed in that row, which then neither
            trains nor measures it.
        given: another label: where it is 0 or unknown, this one was not observed, as a conversion without a click.
    """

    weight: float = Field(default=1.0, gt=0)
    on_null: Literal["error", "ignore"] = "error"
    given: str | None = None


class DenseFeature(_Feature):
    """A number, or `width` numbers in a list of that fixed length.

    Args:
        width: numbers per row; 1 is a plain column.
        default: taken for a null, before the transforms; without it a null is reported.
        transforms: run in the order in which they are listed.
    """

    width: int = Field(default=1, ge=1)
    default: float | None = None
    transforms: list[Transform] = Field(default=[])

    @model_validator(mode="after")
    def _check(self) -> DenseFeature:
        if self.default is not None and not math.isfinite(self.default):
            raise ValueError(f"feature {self.name!r}: default={self.default} must be a finite number")
        return self


class SparseFeature(_Feature):
    """Ids that are looked up in embedding tables.

    Args:
        kind: "id" (one a row), "id_list", or "weighted_id_list" (`list<struct<id, weight>>`, or a list of ids with the
            weights in `weight_column`).
        id_type: "text" or "integer": the other type is refused, wherever rows come from, as 7 and "7" are two ids;
            default: the type that the training data has, which the run writes into its config. With "text" the names of
            folders are taken as they are (`store=007` is "007", not 7).
        mapping: how ids become table rows.
        on_null: for a null id, list, or element: "error" reports it, "empty" leaves it out, "default" takes `default`
            (a null list becomes a list of that one id).
        default: the id that stands for a null; giving it means `on_null: default`.
        max_length: longest list kept (id lists only).
        keep: which end of a longer list is kept; `keep: {last: 50}` is short for it with `max_length: 50`.
        weight_column: list of numbers beside the ids, of the same lengths (weighted lists only).
    """

    kind: Literal["id", "id_list", "weighted_id_list"] = "id"
    id_type: IdType | None = None
    mapping: IdMapping = Identity()
    on_null: Literal["error", "empty", "default"] = "error"
    default: int | str | None = None
    max_length: int | None = Field(default=None, ge=1)
    keep: Literal["first", "last"] = "last"
    weight_column: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("default") is not None and "on_null" not in data:
            data = {**data, "on_null": "default"}
        keep = data.get("keep")
        if isinstance(keep, dict) and len(keep) == 1 and data.get("max_length") is None:
            ((end, length),) = keep.items()
            data = {**data, "keep": end, "max_length": length}
        return data

    @model_validator(mode="after")
    def _check(self) -> SparseFeature:
        if (self.on_null == "default") != (self.default is not None):
            raise ValueError(f"feature {self.name!r}: on_null 'default' and a `default` id belong together")
        if self.max_length is not None and self.kind == "id":
            raise ValueError(f"feature {self.name!r}: max_length is for lists; remove it or use kind id_list")
        if self.weight_column is not None and self.kind != "weighted_id_list":
            raise ValueError(f"feature {self.name!r}: weight_column needs kind weighted_id_list")
        return self

    def with_paths_from(self, folder: Path) -> SparseFeature:
        """As `Schema.with_paths_from`."""
        if not isinstance(self.mapping, Vocabulary) or "://" in self.mapping.path:
            return self
        path = str((folder / Path(self.mapping.path).expanduser()).absolute())
        return self.model_copy(update={"mapping": self.mapping.model_copy(update={"path": path})})

    @property
    def always_one(self) -> bool:
        """Whether every row has exactly one id."""
        drops = isinstance(self.mapping, Identity) and self.mapping.bounds == "drop"
        return self.kind == "id" and self.on_null != "empty" and not drops


class Schema(Strict):
    """A data set's columns: what is predicted and from what.

    Args:
        label: what is predicted; for several labels, `labels` instead.
        sample_weight: how much each row counts; without it all count alike.
        group, timestamp: what evaluations are broken down by; training does not read these columns.
        sequences: which lists belong together.
        derived: columns made of others, that features read by their names.
        column_types: of the columns that derived ones are made of, as the training data has them; the run writes them
            into its config, and rows of a service are read as these types.

    Raises:
        ValueError (pydantic.ValidationError): unknown field, wrong type, a name given twice, or no feature at all.
    """

    label: Label | None = Label()
    labels: list[Task] = Field(default=[])
    sample_weight: SampleWeight | None = None
    group: Group | None = None
    timestamp: Timestamp | None = None
    dense: list[DenseFeature] = Field(default=[])
    sparse: list[SparseFeature] = Field(default=[])
    sequences: list[SequenceColumns] = Field(default=[])
    derived: list[Derived] = Field(default=[])
    column_types: dict[str, str] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _label_or_labels(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("labels"):
            if data.get("label") is not None:
                raise ValueError("give `label` (one) or `labels` (several), not both")
            return {**data, "label": None}
        return data

    @model_validator(mode="after")
    def _check(self) -> Schema:
        if self.label is None and not self.labels:
            raise ValueError("nothing is predicted: give `label`, or several under `labels`")
        tasks = [task.name for task in self.labels]
        twice = sorted({name for name in tasks if tasks.count(name) > 1})
        if twice:
            raise ValueError(f"labels must have names of their own, these appear more than once: {twice}")
        binary = [task.name for task in self.labels if task.kind == "binary"]
        for task in self.labels:
            if task.given is not None and (task.given not in binary or task.given == task.name):
                raise ValueError(f"label {task.name!r}: given={task.given!r} must be another, binary label: {binary}")
        if self.group is not None and "number" in self.label_kinds:
            raise ValueError("group: figures inside groups (GAUC, NDCG) are of binary labels only; take it out")
        names = [feature.name for feature in (*self.dense, *self.sparse)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"feature names must be unique, these appear more than once: {twice}")
        if not names:
            raise ValueError("the schema has no features: list some under dense or sparse")
        for sequence in self.sequences:
            self._check_sequence(sequence)
        check_order(self.derived)
        return self

    def _check_sequence(self, sequence: SequenceColumns) -> None:
        """Its features are there, in no other sequence, and take its length."""
        where, features = f"sequence {sequence.name!r}", {feature.name: feature for feature in self.sparse}
        if [other.name for other in self.sequences].count(sequence.name) > 1:
            raise ValueError(f"{where}: the name is used twice")
        everywhere = [name for other in self.sequences for name in other.ids]
        values = [one.name for one in sequence.values]
        for name in (*sequence.ids, *values):
            if (everywhere + values).count(name) > 1:
                raise ValueError(f"{where}: {name!r} comes twice; a list is in one sequence, once")
        wanted = {"max_length": sequence.length, "keep": sequence.keep_in_file}
        for name in sequence.ids:
            if name not in features or features[name].kind != "id_list":
                raise ValueError(f"{where}: {name!r} is no feature of schema.sparse of kind id_list; add one")
            feature = features[name]
            if feature.max_length not in (None, sequence.length):
                raise ValueError(
                    f"{where}: feature {name!r} has max_length={feature.max_length}; take it out: the sequence's "
                    f"length={sequence.length} holds for all of its lists"
                )
            self.sparse[self.sparse.index(feature)] = feature.model_copy(update=wanted)

    def with_paths_from(self, folder: Path) -> Schema:
        """The same with absolute paths: those of vocabularies, where they are relative, start from `folder`."""
        return self.model_copy(update={"sparse": [feature.with_paths_from(folder) for feature in self.sparse]})

    @property
    def tasks(self) -> list[Task]:
        """What is predicted, in the order of the logits; a single one where there is one `label`."""
        return self.labels if self.label is None else [Task(name="label", **self.label.model_dump())]

    @property
    def task_names(self) -> list[str] | None:
        """The names of several labels; None for one."""
        return None if self.label is not None else [task.name for task in self.labels]

    @property
    def label_kinds(self) -> tuple[LabelKind, ...]:
        """Of what is predicted, in the order of the logits."""
        return tuple(task.kind for task in self.tasks)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """What follows B in the shape of labels and logits: nothing for one label, T for several."""
        return () if self.label is not None else (len(self.labels),)

    @property
    def for_training(self) -> Schema:
        """The same without what only evaluations read."""
        return self.model_copy(update={"group": None, "timestamp": None})

    @property
    def for_scoring(self) -> Schema:
        """The same without what only rows with labels have beside them."""
        return self.model_copy(update={"sample_weight": None, "group": None, "timestamp": None})

    @property
    def num_dense(self) -> int:
        """N, the columns of `Batch.dense`."""
        return sum(feature.width for feature in self.dense)

    @property
    def sparse_names(self) -> list[str]:
        """The keys of the batches' KeyedJaggedTensor, in order."""
        return [feature.name for feature in self.sparse]

    @property
    def num_lists(self) -> int:
        """Jagged columns of mapped rows: the sparse features, and the sequences' times and numbers."""
        return len(self.sparse) + sum(len(sequence.values) for sequence in self.sequences)

    @property
    def weighted(self) -> bool:
        """Whether batches carry a weight for every id."""
        return any(feature.kind == "weighted_id_list" for feature in self.sparse)

    @property
    def spare_columns(self) -> set[str]:
        """Those that a file may lack: all that is made of them takes nulls."""
        takes = [(task.column, task.on_null == "ignore") for task in self.tasks]
        takes += [(part.column, False) for part in self._beside if part]
        takes += [(name, feature.default is not None) for feature in self.dense for name in self.sources(feature)]
        takes += [(name, feature.on_null != "error") for feature in self.sparse for name in self.sources(feature)]
        takes += [(one.column_name, False) for sequence in self.sequences for one in sequence.values]
        return {column for column, _ in takes} - {column for column, nulls in takes if not nulls}

    @property
    def text_columns(self) -> list[str]:
        """Those whose ids are known to be texts."""
        made = {spec.name for spec in self.derived}
        return [f.column for f in self.sparse if f.id_type == "text" and f.column not in made]

    @property
    def _beside(self) -> tuple[SampleWeight | Group | Timestamp | None, ...]:
        return (self.sample_weight, self.group, self.timestamp)

    @property
    def columns(self) -> list[str]:
        """The Parquet columns that are read, each once."""
        targets = [*(task.column for task in self.tasks), *(part.column for part in self._beside if part)]
        return list(dict.fromkeys([*targets, *self.feature_columns]))

    @property
    def feature_columns(self) -> list[str]:
        """Those of them that features are made of: what a row has before its label is known."""
        names = [name for feature in (*self.dense, *self.sparse) for name in self.sources(feature)]
        names += [one.column_name for sequence in self.sequences for one in sequence.values]
        return list(dict.fromkeys(names))

    def sources(self, feature: _Feature) -> list[str]:
        """The columns of the data that a feature is made of."""
        return sources(self.derived, _columns_of(feature))

    @property
    def derived_needed(self) -> list[Derived]:
        """The derived columns that features are made of, in their order."""
        return needed(self.derived, [name for feature in (*self.dense, *self.sparse) for name in _columns_of(feature)])


def _columns_of(feature: _Feature) -> list[str]:
    """What a feature reads, derived or not."""
    weights = feature.weight_column if isinstance(feature, SparseFeature) else None
    return [feature.column] + ([weights] if weights else [])
