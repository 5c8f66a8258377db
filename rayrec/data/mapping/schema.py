"""The schema of a data set: labels, dense and sparse features, and how ids map to table rows.

A schema is part of the train config and independent of files; `column_types.py` checks files against it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rayrec._runtime.strict import Strict
from rayrec.data.mapping.derived.specs import Derived, Entity, Events, check_order, needed, sources
from rayrec.data.mapping.rules import Dynamic, Hash, Identity, IdMapping, LabelKind, LabelRule
from rayrec.data.mapping.sequences import SequenceColumns, SequenceValues
from rayrec.data.mapping.transforms import Transform

IdType = Literal["text", "integer"]


class Label(LabelRule):
    """The label column."""

    column: str = "label"


class SampleWeight(Strict):
    """A column of weights, at least 0, for the loss and every metric."""

    column: str = "weight"


class Group(Strict):
    """A column that groups rows, e.g. by user or request. Evaluations then also give GAUC, the mean AUC over groups."""

    column: str = "group"


class Timestamp(Strict):
    """The time of a row. Evaluations then also give their metrics per interval of time (UTC).

    Args:
        unit: Unit of integers, counted from 1970. Arrow timestamps and dates carry their unit.
        bucket: Length of an interval.
    """

    column: str = "timestamp"
    unit: Literal["s", "ms", "us", "ns"] = "s"
    bucket: Literal["hour", "day", "week"] = "day"


class _Feature(Strict):
    """Base of features. `column` defaults to the feature's name."""

    name: str = Field(min_length=1)
    column: str = Field(default="", min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _column_defaults_to_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" in data and data.get("column") is None:
            return {**data, "column": data["name"]}
        return data


class Task(LabelRule, _Feature):
    """One of several named labels.

    Args:
        weight: Weight of its loss in the sum over labels.
        on_null: "error" reports nulls; "ignore" treats them as not observed: the row neither trains nor measures this
            label.
        given: Another label. If it is 0 or null, this label is not observed, e.g. a conversion without a click.
    """

    weight: float = Field(default=1.0, gt=0)
    on_null: Literal["error", "ignore"] = "error"
    given: str | None = None


class DenseFeature(_Feature):
    """A number, or a list of `width` numbers.

    Args:
        width: Numbers per row; 1 for a plain column.
        default: Replaces nulls before the transforms. Without it, nulls are errors.
        transforms: Applied in this order.
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
        kind: "id" (one per row), "id_list", or "weighted_id_list" (`list<struct<id, weight>>`, or a list of ids with
            the weights in `weight_column`).
        id_type: "text" or "integer"; the other type is refused, because 7 and "7" are different ids. Default: the type
            in the training data, which the run writes into its config. With "text", partition values stay strings
            (`store=007` is "007", not 7).
        mapping: How ids map to table rows.
        on_null: For a null id, list or element: "error" reports it, "empty" drops it, "default" replaces it by
            `default` (a null list by a list of that id).
        default: Id that replaces nulls; implies `on_null: default`.
        max_length: Maximum length of a list; longer ones are cut.
        keep: End of a longer list that is kept. `keep: {last: 50}` is short for `max_length: 50, keep: last`.
        weight_column: Column with the weights: a list of numbers as long as the list of ids (weighted lists only).
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
            raise ValueError(f"feature {self.name!r}: set both on_null: default and a `default` id, or neither")
        if self.max_length is not None and self.kind == "id":
            raise ValueError(f"feature {self.name!r}: max_length applies to lists; remove it or set kind: id_list")
        if self.weight_column is not None and self.kind != "weighted_id_list":
            raise ValueError(f"feature {self.name!r}: weight_column needs kind: weighted_id_list")
        return self

    def with_paths_from(self, folder: Path) -> SparseFeature:
        """A copy with the relative path of its vocabulary or map resolved against `folder`."""
        given = getattr(self.mapping, "path", None)
        if given is None or "://" in given:
            return self
        path = str((folder / Path(given).expanduser()).absolute())
        return self.model_copy(update={"mapping": self.mapping.model_copy(update={"path": path})})

    @property
    def always_one(self) -> bool:
        """True if every row has exactly one id."""
        drops = isinstance(self.mapping, Identity) and self.mapping.bounds == "drop"
        drops |= isinstance(self.mapping, Dynamic) and self.mapping.unseen == "zero"
        return self.kind == "id" and self.on_null != "empty" and not drops


class Schema(Strict):
    """The columns of a data set: labels and features.

    Args:
        label: The label; for several labels, use `labels`.
        sample_weight: Column of row weights. Default: all rows weigh the same.
        group, timestamp: Columns by which evaluations break down their metrics; training does not read them.
        sequences: Lists that belong together.
        derived: Columns computed from other columns. Features read them by name.
        column_types: Types of the source columns of derived columns in the training data. The run writes them into its
            config; a service casts requests to them. Names the width of a narrow number (float32), to which all
            numbers of the column are rounded.

    Raises:
        ValueError (pydantic.ValidationError): unknown field, wrong type, duplicate name, or no feature.
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
            raise ValueError("no label: give `label`, or several under `labels`")
        tasks = [task.name for task in self.labels]
        duplicates = sorted({name for name in tasks if tasks.count(name) > 1})
        if duplicates:
            raise ValueError(f"label names must be unique, these appear more than once: {duplicates}")
        binary = [task.name for task in self.labels if task.kind == "binary"]
        for task in self.labels:
            if task.given is not None and (task.given not in binary or task.given == task.name):
                raise ValueError(f"label {task.name!r}: given={task.given!r} must name another binary label: {binary}")
        if self.group is not None and "number" in self.label_kinds:
            raise ValueError("group: metrics per group (GAUC, NDCG) need binary labels; remove it")
        names = [feature.name for feature in (*self.dense, *self.sparse)]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"feature names must be unique, these appear more than once: {duplicates}")
        if not names:
            raise ValueError("the schema has no features: list some under dense or sparse")
        for sequence in self.sequences:
            self._check_sequence(sequence)
        self._check_dynamic()
        check_order(self.derived)
        return self

    def _check_sequence(self, sequence: SequenceColumns) -> None:
        """Checks that its features exist and are in no other sequence, and sets their length."""
        prefix, features = f"sequence {sequence.name!r}", {feature.name: feature for feature in self.sparse}
        if [other.name for other in self.sequences].count(sequence.name) > 1:
            raise ValueError(f"{prefix}: the name is used twice")
        all_ids = [name for other in self.sequences for name in other.ids]
        values = [value.name for value in sequence.values]
        for name in (*sequence.ids, *values):
            if (all_ids + values).count(name) > 1:
                raise ValueError(f"{prefix}: {name!r} is listed twice; a list belongs to one sequence, once")
        update = {"max_length": sequence.length, "keep": sequence.keep_in_file}
        for name in sequence.ids:
            if name not in features or features[name].kind != "id_list":
                raise ValueError(f"{prefix}: schema.sparse has no feature {name!r} of kind id_list; add one")
            feature = features[name]
            if feature.max_length not in (None, sequence.length):
                raise ValueError(
                    f"{prefix}: remove max_length={feature.max_length} of feature {name!r}: the sequence's "
                    f"length={sequence.length} applies to all of its lists"
                )
            self.sparse[self.sparse.index(feature)] = feature.model_copy(update=update)

    def _check_dynamic(self) -> None:
        """Dynamic ids have one clock of event time, and no list of a sequence loses ids in evaluation."""
        times = sorted({mapping.time for mapping in self.dynamic.values() if mapping.time is not None})
        if len(times) > 1:
            raise ValueError(f"mapping.time: all dynamic ids of a schema need the same column; they have {times}")
        in_sequence = {name: sequence.name for sequence in self.sequences for name in sequence.ids}
        for name, mapping in self.dynamic.items():
            if mapping.unseen == "zero" and name in in_sequence:
                raise ValueError(
                    f"feature {name!r}: `unseen: zero` leaves ids out, but the lists of sequence {in_sequence[name]!r} "
                    "keep equal lengths; set `unseen: hashed`"
                )

    @property
    def dynamic(self) -> dict[str, Dynamic]:
        """The rules of the features with dynamic ids, by name."""
        return {one.name: one.mapping for one in self.sparse if isinstance(one.mapping, Dynamic)}

    @property
    def event_time(self) -> Timestamp | None:
        """The time of a row that dynamic ids are dated by; None if no feature has one."""
        column = next((mapping.time for mapping in self.dynamic.values() if mapping.time is not None), None)
        if column is None or (self.timestamp is not None and self.timestamp.column == column):
            return self.timestamp if column is not None else None
        return Timestamp(column=column)

    @property
    def hashed(self) -> Schema:
        """A copy in which dynamic ids are hashed to rows, for statistics of data without a trained table."""
        rule = Hash(text_law=2)
        sparse = [one.model_copy(update={"mapping": rule}) if one.name in self.dynamic else one for one in self.sparse]
        return self.model_copy(update={"sparse": sparse})

    def with_paths_from(self, folder: Path) -> Schema:
        """A copy with the relative paths of vocabularies resolved against `folder`."""
        return self.model_copy(update={"sparse": [feature.with_paths_from(folder) for feature in self.sparse]})

    @property
    def tasks(self) -> list[Task]:
        """The labels, in the order of the logits; one task for a single `label`."""
        return self.labels if self.label is None else [_task_of(self.label)]

    @property
    def task_names(self) -> list[str] | None:
        """The names of several labels; None for a single one."""
        return None if self.label is not None else [task.name for task in self.labels]

    @property
    def label_kinds(self) -> tuple[LabelKind, ...]:
        """The kind of each label, in the order of the logits."""
        return tuple(task.kind for task in self.tasks)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a row's labels and logits: () for one label, (T,) for several."""
        return () if self.label is not None else (len(self.labels),)

    @property
    def for_training(self) -> Schema:
        """A copy without the columns that only evaluations read; the time that dynamic ids are dated by stays."""
        return self.model_copy(update={"group": None, "timestamp": self.event_time})

    @property
    def for_scoring(self) -> Schema:
        """A copy without sample weight, group and timestamp."""
        return self.model_copy(update={"sample_weight": None, "group": None, "timestamp": None})

    @property
    def num_dense(self) -> int:
        """Columns of `Batch.dense`."""
        return sum(feature.width for feature in self.dense)

    @property
    def sparse_names(self) -> list[str]:
        """Keys of the batches' KeyedJaggedTensor, in order."""
        return [feature.name for feature in self.sparse]

    @property
    def num_lists(self) -> int:
        """Jagged columns of mapped rows: sparse features, and the times and numbers of sequences."""
        return len(self.sparse) + sum(len(sequence.values) for sequence in self.sequences)

    @property
    def weighted(self) -> bool:
        """True if batches carry a weight for every id."""
        return any(feature.kind == "weighted_id_list" for feature in self.sparse)

    @property
    def optional_columns(self) -> set[str]:
        """Columns that a file may lack, because every reader of the column accepts nulls."""
        readers = [(task.column, task.on_null == "ignore") for task in self.tasks]
        readers += [(section.column, False) for section in self._row_columns if section]
        readers += [(name, feature.default is not None) for feature in self.dense for name in self.sources(feature)]
        readers += [(name, feature.on_null != "error") for feature in self.sparse for name in self.sources(feature)]
        values = [value.column_name for sequence in self.sequences for value in sequence.values]
        readers += [(name, False) for name in sources(self.derived, values)]
        return {column for column, _ in readers} - {column for column, nulls in readers if not nulls}

    @property
    def text_columns(self) -> list[str]:
        """Columns with text ids by `id_type`."""
        derived = {spec.name for spec in self.derived}
        return [f.column for f in self.sparse if f.id_type == "text" and f.column not in derived]

    @property
    def plain_id_columns(self) -> set[str]:
        """Columns of single ids that are hashed or looked up, and that nothing else reads."""
        plain = [f for f in self.sparse if f.kind == "id" and f.mapping.kind != "identity"]
        others = [
            name for feature in (*self.dense, *self.sparse) if feature not in plain for name in _columns_of(feature)
        ]
        others += [reader.column for reader in (*self.tasks, *self._row_columns) if reader]
        others += [value.column_name for sequence in self.sequences for value in sequence.values]
        others += [name for spec in self.derived for name in (spec.name, *spec.inputs)]
        return {feature.column for feature in plain} - {*others}

    @property
    def column_kinds(self) -> dict[str, Literal["text", "integer", "number"]]:
        """What columns hold, as far as the schema says: ids by `id_type`, numbers, and the types of a run's columns."""
        kinds: dict[str, Any] = {feature.column: "number" for feature in self.dense if feature.width == 1}
        kinds |= {name: kind for name, kind in self.column_types.items() if kind in ("text", "integer", "number")}
        # Lists in JSON are lists, whatever their ids are.
        kinds |= {
            feature.column: feature.id_type for feature in self.sparse if feature.id_type and feature.kind == "id"
        }
        derived = {spec.name for spec in self.derived}
        return {name: kind for name, kind in kinds.items() if name not in derived}

    @property
    def _row_columns(self) -> tuple[SampleWeight | Group | Timestamp | None, ...]:
        return (self.sample_weight, self.group, self.timestamp)

    @property
    def columns(self) -> list[str]:
        """The Parquet columns to read, without duplicates."""
        targets = [*(task.column for task in self.tasks), *(section.column for section in self._row_columns if section)]
        return list(dict.fromkeys([*targets, *self.feature_columns]))

    @property
    def feature_columns(self) -> list[str]:
        """The Parquet columns of features: all that a row has when it is scored."""
        return sources(self.derived, self._read_columns)

    def sources(self, feature: _Feature) -> list[str]:
        """The Parquet columns that a feature depends on."""
        return sources(self.derived, _columns_of(feature))

    def sources_beside_times(self, feature: _Feature) -> list[str]:
        """As `sources`, without the times that select versions of entities, unless something else reads them."""
        timeless = [
            spec.model_copy(update={"valid_from": None, "at": None}) if isinstance(spec, Entity) else spec
            for spec in self.derived
        ]
        return sources(timeless, _columns_of(feature))

    def sources_of_values(self, sequence: SequenceColumns) -> set[str]:
        """The Parquet columns that the times and numbers of a sequence depend on."""
        return {*sources(self.derived, [value.column_name for value in sequence.values])}

    @property
    def stored_values(self) -> list[SequenceValues]:
        """The times and numbers of sequences that are columns of the data, not derived ones."""
        derived = {spec.name for spec in self.derived}
        values = [value for sequence in self.sequences for value in sequence.values]
        return [value for value in values if value.column_name not in derived]

    @property
    def histories(self) -> list[str]:
        """The lists of events that features use, which rows may have themselves."""
        return [spec.name for spec in self.derived_needed if isinstance(spec, Events)]

    @property
    def derived_needed(self) -> list[Derived]:
        """The derived columns that features use, in their order."""
        return needed(self.derived, self._read_columns)

    @property
    def _read_columns(self) -> list[str]:
        """The columns that features and sequences read, derived or not."""
        names = [name for feature in (*self.dense, *self.sparse) for name in _columns_of(feature)]
        return names + [value.column_name for sequence in self.sequences for value in sequence.values]


@lru_cache(64)
def _task_of(label: Label) -> Task:
    """A single label as a task. Kept, because each batch of a service reads it several times."""
    return Task(name="label", **label.model_dump())


def _columns_of(feature: _Feature) -> list[str]:
    """The columns that a feature reads, derived or not."""
    weights = feature.weight_column if isinstance(feature, SparseFeature) else None
    return [feature.column] + ([weights] if weights else [])
