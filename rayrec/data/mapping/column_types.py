"""Checks the Arrow types of a file's columns against the schema. `map_rows.py` checks the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_list, is_text, leaf_of, plain_type, same_kind, without_views
from rayrec.data.arrays.widening import has_null_type
from rayrec.data.mapping.derived.derive import derived_types
from rayrec.data.mapping.derived.scalars import unfitted
from rayrec.data.mapping.derived.specs import sources
from rayrec.data.mapping.null_types import read_types
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import DenseFeature, IdType, Schema, SparseFeature, Task
from rayrec.data.mapping.sequences import check_value_type
from rayrec.data.mapping.transforms import Fitted
from rayrec.data.mapping.vocabulary import first_text, load_vocabulary
from rayrec.storage.column_names import column_missing, equal_names
from rayrec.storage.errors import DataError

# id_type: what its ids are, and the type to cast to.
_IDS = {"text": ("string ids", "string"), "integer": ("integer ids", "int64")}


def _is_integer(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind.value_type if pat.is_dictionary(kind) else kind))


def _is_number(kind: pa.DataType) -> bool:
    if pat.is_dictionary(kind):
        kind = kind.value_type
    return bool(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind) or pat.is_boolean(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind) or pat.is_timestamp(kind) or pat.is_date(kind))


def check_types(
    schema: Schema, arrow: pa.Schema, file: str, *, labelled: bool = True, columns: Sequence[str] | None = None
) -> None:
    """Checks that a file has every column of the schema, with a supported type.

    Args:
        labelled: if False, check the features only.
        columns: the columns to check, if already known.

    Raises:
        DataError: a missing column, or a wrong type; names the file, the column, the actual and the expected type.
    """
    names = columns or (schema.columns if labelled else schema.feature_columns)
    _check_present(names, arrow, file)
    types = {name: arrow.field(name).type for name in names}
    arrow = pa.schema(list(read_types(schema, types).items()))
    if labelled:
        _check_targets(schema, arrow, file)
    _check_features(schema, _with_derived(schema, arrow, file), file)


def fill_id_types(schema: Schema, columns: Mapping[str, pa.DataType]) -> Schema:
    """The schema with missing `id_type` and `column_types` filled in from the columns' types."""
    types = columns
    if schema.derived:
        plain = {name: without_views(kind) for name, kind in read_types(schema, columns).items()}
        types = derived_types(schema.derived_needed, plain) | {
            name: kind for name, kind in columns.items() if has_null_type(kind)
        }
    sparse = [
        # A column of nulls only does not tell the type of its ids: a later launch may.
        feature
        if feature.id_type or has_null_type(types[feature.column])
        else feature.model_copy(update={"id_type": _id_type(types[feature.column])})
        for feature in schema.sparse
    ]
    source_names = sources(schema.derived, [spec.name for spec in schema.derived_needed])
    known = {name: plain_type(columns[name]) for name in source_names if not has_null_type(columns[name])}
    column_types = known | {name: _wider_name(plain, known.get(name)) for name, plain in schema.column_types.items()}
    return schema.model_copy(update={"sparse": sparse, "column_types": column_types})


def _wider_name(recorded: str, plain: str | None) -> str:
    """The recorded type; of integers, the type of numbers that the data has now."""
    if plain is None or same_kind(recorded, plain):
        return recorded
    return plain if same_kind(recorded.replace("integer", "number"), plain) else recorded


def _with_derived(schema: Schema, arrow: pa.Schema, file: str) -> pa.Schema:
    """Adds the types of derived columns. Checks that each can be computed."""
    if not schema.derived:
        return arrow
    types = {name: without_views(arrow.field(name).type) for name in schema.feature_columns}
    for name, expected in schema.column_types.items():
        # An integer in training may be a number now: `derived_types` refuses it for ids. Earlier runs recorded decimals
        # without a fraction, which are integers now.
        accepted = (expected, expected.replace("integer", "number"), expected.replace("decimal", "integer"))
        if name in types and not any(same_kind(plain := plain_type(types[name]), kind) for kind in accepted):
            fix = f"cast it from {plain} to {expected}, the type in the training data (schema.column_types)"
            raise _wrong(f"column {name!r}", expected, types[name], file, name, fix=fix)
    try:
        types = derived_types(schema.derived_needed, types)
    except DataError as error:
        raise replace(error, file=error.file or file) from error
    return pa.schema(list(read_types(schema, types).items()))


def _id_type(kind: pa.DataType) -> IdType:
    leaf = leaf_of(kind)
    return "text" if is_text(leaf.field("id").type if pat.is_struct(leaf) else leaf) else "integer"


def _check_present(columns: Sequence[str], arrow: pa.Schema, file: str) -> None:
    for column in columns:
        if column not in arrow.names:
            fix = "correct the column's name in the schema, or add the column to the file"
            raise column_missing(column, arrow, file, fix)
        if arrow.names.count(column) > 1:
            raise equal_names(column, [file])


def _check_targets(schema: Schema, arrow: pa.Schema, file: str) -> None:
    for task in schema.tasks:
        _check_label(task, arrow.field(task.column).type, file)
    roles: list[tuple[Any, str, str, Callable[[pa.DataType], bool]]] = [
        (schema.sample_weight, "the sample weight", "a number", _is_number),
        (schema.group, "the group", "an integer or a string", lambda kind: _is_integer(kind) or is_text(kind)),
        (schema.timestamp, "the timestamp", "a timestamp, a date or an integer", _is_time),
    ]
    for section, subject, expected, fits in roles:
        if section is not None and not fits(kind := arrow.field(section.column).type):
            raise _wrong(subject, expected, kind, file, section.column)


def _check_label(task: Task, column_type: pa.DataType, file: str) -> None:
    if isinstance(task.positive, str):
        fits, expected = is_text(column_type), f"a string, as positive={task.positive!r} is"
    elif task.positive is not None:
        fits, expected = _is_integer(column_type), f"an integer, as positive={task.positive} is"
    elif task.at_least is not None:
        fits, expected = _is_number(column_type), f"a number, to be at least {task.at_least:g}"
    else:
        fits, expected = (
            _is_number(column_type) and not pat.is_decimal(column_type),
            "a number or boolean that is 0 or 1",
        )
    if not fits:
        fix = f"set the value that counts as 1: label: {{column: {task.column}, positive: VALUE}}"
        if not is_text(column_type):
            fix += ", or a threshold: at_least: NUMBER"
        raise _wrong("the label", expected, column_type, file, task.column, fix=fix)


def _check_features(schema: Schema, arrow: pa.Schema, file: str) -> None:
    for dense in schema.dense:
        _check_dense(dense, arrow.field(dense.column).type, file)
    for sparse in schema.sparse:
        _check_sparse(sparse, arrow, file)
    for sequence in schema.sequences:
        for values in sequence.values:
            kind = arrow.field(values.column_name).type
            if (expected := check_value_type(values, kind)) is not None:
                raise _wrong(
                    f"{values.kind} {values.name!r} of sequence {sequence.name!r}",
                    expected,
                    kind,
                    file,
                    values.column_name,
                )


def _check_dense(feature: DenseFeature, column_type: pa.DataType, file: str) -> None:
    name = f"dense feature {feature.name!r}"
    for step in feature.transforms:
        if isinstance(step, Fitted) and not step.fitted:
            raise unfitted(name, f"the statistics of {step.kind}", feature.column)
    if feature.width == 1:
        if not _is_number(column_type):
            raise _wrong(name, "a number", column_type, file, feature.column)
    elif not is_list(column_type) or not _is_number(column_type.value_type):
        raise _wrong(name, f"a list of {feature.width} numbers", column_type, file, feature.column)


def _check_sparse(feature: SparseFeature, arrow: pa.Schema, file: str) -> None:
    name, kind = f"feature {feature.name!r}", arrow.field(feature.column).type
    if feature.kind == "id":
        _check_id(feature, kind, file, "")
        return
    pairs = feature.kind == "weighted_id_list" and feature.weight_column is None
    if pairs:
        item = kind.value_type if is_list(kind) else None
        if item is None or not pat.is_struct(item) or {f.name for f in item.fields} != {"id", "weight"}:
            raise _wrong(name, "list<struct<id, weight>>", kind, file, feature.column)
        if not _is_number(item.field("weight").type):
            raise _wrong(name, "a number as weight", item.field("weight").type, file, feature.column)
        _check_id(feature, item.field("id").type, file, "in a list of id and weight, ")
        return
    if not is_list(kind):
        raise _wrong(name, "a list of ids", kind, file, feature.column, fix="set kind: id, or convert the column")
    _check_id(feature, kind.value_type, file, "in a list, ")
    if feature.weight_column is not None:
        weights = arrow.field(feature.weight_column).type
        if not is_list(weights) or not _is_number(weights.value_type):
            raise _wrong(name, "a list of weights", weights, file, feature.weight_column)


def _check_id(feature: SparseFeature, kind: pa.DataType, file: str, context: str) -> None:
    name = f"feature {feature.name!r}"
    if is_list(kind):
        fix = "set kind: id_list" if feature.kind == "id" else "flatten the lists to one level"
        raise _wrong(name, f"{context}an id", kind, file, feature.column, fix=fix)
    if is_text(kind):
        if feature.mapping.kind == "identity":
            raise _wrong(name, f"{context}an integer", kind, file, feature.column, fix="set mapping: {kind: hash}")
    elif not _is_integer(kind):
        floats = "write integers (pandas converts integer columns with nulls to floats; use astype('Int64'))"
        to_do = floats if pat.is_floating(kind) else None
        raise _wrong(name, f"{context}an integer or a string", kind, file, feature.column, fix=to_do)
    if feature.id_type is not None and is_text(kind) != (feature.id_type == "text"):
        ids, target = _IDS[feature.id_type]
        raise DataError(
            f"{name} was trained on {ids} (id_type: {feature.id_type}); the column's type is {kind}",
            file=file,
            column=feature.column,
            fix=f"cast the column to {target}",
        )
    if isinstance(feature.mapping, Vocabulary) and load_vocabulary(feature.mapping.path).text != is_text(kind):
        ids, expected = ("integers", "an integer") if is_text(kind) else ("strings", "a string")
        fix = "use a vocabulary of the column's type, or cast the column"
        if not is_text(kind) and (other := first_text(feature.mapping.path)) is not None:
            fix += f"; {other!r} in the vocabulary is not an integer"
        raise _wrong(
            f"{name} has a vocabulary of {ids}; it", f"{context}{expected}", kind, file, feature.column, fix=fix
        )
    if feature.default is not None and isinstance(feature.default, str) != is_text(kind):
        expected = "a string" if is_text(kind) else "an integer"
        raise DataError(
            f"{name}: default={feature.default!r} must be {expected}, like the column's ids",
            file=file,
            column=feature.column,
            fix="set a default of the column's type",
        )


def _wrong(
    subject: str, expected: str, actual: pa.DataType, file: str, column: str, fix: str | None = None
) -> DataError:
    return DataError(
        f"{subject} must be {expected}; the column's type is {actual}",
        file=file,
        column=column,
        fix=fix or "convert the column, or change the feature's kind or column in the schema",
    )
