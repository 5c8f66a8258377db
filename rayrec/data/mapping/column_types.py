"""Which Arrow types a column may have for what the schema says it is.

Only types are checked here, from footers; values are checked in `map_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_list, is_text, leaf_of, plain_type, without_views
from rayrec.data.mapping.derived.derive import derived_types
from rayrec.data.mapping.derived.scalars import unfitted
from rayrec.data.mapping.derived.specs import sources
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import DenseFeature, IdType, Schema, SparseFeature, Task
from rayrec.data.mapping.sequences import check_value_type
from rayrec.data.mapping.transforms import Fitted
from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.storage.errors import DataError, suggestion

_IDS = {"text": "texts", "integer": "integers"}


def _is_integer(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind.value_type if pat.is_dictionary(kind) else kind))


def _is_number(kind: pa.DataType) -> bool:
    if pat.is_dictionary(kind):
        kind = kind.value_type
    return bool(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind) or pat.is_boolean(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind) or pat.is_timestamp(kind) or pat.is_date(kind))


def check_types(schema: Schema, found: pa.Schema, file: str, *, labelled: bool = True) -> None:
    """That a file has every column of the schema, of a type that can be mapped.

    Args:
        labelled: if False, of the features alone: the label need not be there.

    Raises:
        DataError: a missing column, or one of a wrong type, with file, column, found and wanted types.
    """
    _check_present(schema.columns if labelled else schema.feature_columns, found, file)
    if labelled:
        _check_targets(schema, found, file)
    _check_features(schema, _with_derived(schema, found, file), file)


def fill_id_types(schema: Schema, columns: Mapping[str, pa.DataType]) -> Schema:
    """The schema with the type of every feature's ids, as columns that fit it have it where it does not say; and those
    of the columns that derived ones are made of.
    """
    types = columns
    if schema.derived:
        types = derived_types(schema.derived_needed, {name: without_views(kind) for name, kind in columns.items()})
    sparse = [
        feature if feature.id_type else feature.model_copy(update={"id_type": _id_type(types[feature.column])})
        for feature in schema.sparse
    ]
    made_of = sources(schema.derived, [spec.name for spec in schema.derived_needed])
    known = {name: plain_type(columns[name]) for name in made_of} | schema.column_types
    return schema.model_copy(update={"sparse": sparse, "column_types": known})


def _with_derived(schema: Schema, found: pa.Schema, file: str) -> pa.Schema:
    """With the derived columns, each of which can be made."""
    if not schema.derived:
        return found
    types = {name: without_views(found.field(name).type) for name in schema.feature_columns}
    for name, wanted in schema.column_types.items():
        if name in types and (plain := plain_type(types[name])) != wanted:
            fix = "give values of the type that the model was trained with (schema.column_types)"
            raise _wrong(f"column {name!r}", wanted, types[name], file, name, fix=f"{fix}; as {plain} they are others")
    try:
        types = derived_types(schema.derived_needed, types)
    except DataError as error:
        raise DataError(error.problem, file=file, column=error.column, fix=error.fix) from error
    return pa.schema(list(types.items()))


def _id_type(kind: pa.DataType) -> IdType:
    leaf = leaf_of(kind)
    return "text" if is_text(leaf.field("id").type if pat.is_struct(leaf) else leaf) else "integer"


def _check_present(columns: list[str], found: pa.Schema, file: str) -> None:
    for column in columns:
        if column not in found.names:
            fix = "correct the column's name in the schema, or add the column to the file"
            raise column_missing(column, found, file, fix)
        if found.names.count(column) > 1:
            raise DataError("two columns have this name", file=file, column=column, fix="rename one of them")


def _check_targets(schema: Schema, found: pa.Schema, file: str) -> None:
    for task in schema.tasks:
        _check_label(task, found.field(task.column).type, file)
    beside: list[tuple[Any, str, str, Callable[[pa.DataType], bool]]] = [
        (schema.sample_weight, "the sample weight", "a number", _is_number),
        (schema.group, "the group", "an integer or a string", lambda kind: _is_integer(kind) or is_text(kind)),
        (schema.timestamp, "the timestamp", "a timestamp, a date or an integer", _is_time),
    ]
    for part, what, wanted, fits in beside:
        if part is not None and not fits(kind := found.field(part.column).type):
            raise _wrong(what, wanted, kind, file, part.column)


def _check_label(task: Task, found: pa.DataType, file: str) -> None:
    if isinstance(task.positive, str):
        fits, wanted = is_text(found), f"a string, as positive={task.positive!r} is"
    elif task.positive is not None:
        fits, wanted = _is_integer(found), f"an integer, as positive={task.positive} is"
    elif task.at_least is not None:
        fits, wanted = _is_number(found), f"a number, to be at least {task.at_least:g}"
    else:
        fits, wanted = _is_number(found) and not pat.is_decimal(found), "a number or boolean that is 0 or 1"
    if not fits:
        fix = f"say which value counts as 1: label: {{column: {task.column}, positive: VALUE}}"
        if not is_text(found):
            fix += ", or the number that is large enough: at_least: NUMBER"
        raise _wrong("the label", wanted, found, file, task.column, fix=fix)


def _check_features(schema: Schema, found: pa.Schema, file: str) -> None:
    for dense in schema.dense:
        _check_dense(dense, found.field(dense.column).type, file)
    for sparse in schema.sparse:
        _check_sparse(sparse, found, file)
    for sequence in schema.sequences:
        for one in sequence.values:
            kind = found.field(one.column_name).type
            if (wanted := check_value_type(one, kind)) is not None:
                raise _wrong(
                    f"{one.kind} {one.name!r} of sequence {sequence.name!r}", wanted, kind, file, one.column_name
                )


def column_missing(column: str, found: pa.Schema, file: str, fix: str) -> DataError:
    """The error of a file that lacks a column."""
    names = found.names
    there = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    problem = f"column {column!r} is missing; the file has {there}{suggestion(column, names)}"
    return DataError(problem, file=file, column=column, fix=fix)


def _check_dense(feature: DenseFeature, found: pa.DataType, file: str) -> None:
    name = f"dense feature {feature.name!r}"
    for step in feature.transforms:
        if isinstance(step, Fitted) and not step.fitted:
            raise unfitted(name, f"statistics of {step.kind}", feature.column)
    if feature.width == 1:
        if not _is_number(found):
            raise _wrong(name, "a number", found, file, feature.column)
    elif not is_list(found) or not _is_number(found.value_type):
        raise _wrong(name, f"a list of {feature.width} numbers", found, file, feature.column)


def _check_sparse(feature: SparseFeature, found: pa.Schema, file: str) -> None:
    name, kind = f"feature {feature.name!r}", found.field(feature.column).type
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
        raise _wrong(name, "a list of ids", kind, file, feature.column, fix="set kind: id, or fix the column")
    _check_id(feature, kind.value_type, file, "in a list, ")
    if feature.weight_column is not None:
        weights = found.field(feature.weight_column).type
        if not is_list(weights) or not _is_number(weights.value_type):
            raise _wrong(name, "a list of weights", weights, file, feature.weight_column)


def _check_id(feature: SparseFeature, kind: pa.DataType, file: str, where: str) -> None:
    name = f"feature {feature.name!r}"
    if is_list(kind):
        fix = "set kind: id_list" if feature.kind == "id" else "flatten the lists to one level"
        raise _wrong(name, f"{where}an id", kind, file, feature.column, fix=fix)
    if is_text(kind):
        if feature.mapping.kind == "identity":
            raise _wrong(name, f"{where}an integer", kind, file, feature.column, fix="set mapping: {kind: hash}")
    elif not _is_integer(kind):
        floats = "write integers (pandas makes floats of them where some are null: astype('Int64'))"
        to_do = floats if pat.is_floating(kind) else None
        raise _wrong(name, f"{where}an integer or a string", kind, file, feature.column, fix=to_do)
    if feature.id_type is not None and is_text(kind) != (feature.id_type == "text"):
        wanted = "a string" if feature.id_type == "text" else "an integer"
        raise _wrong(
            f"{name}, whose ids are {_IDS[feature.id_type]} by the schema's id_type,",
            f"{where}{wanted}",
            kind,
            file,
            feature.column,
            fix="give ids of the type that the model was trained with; as the other type they are other ids",
        )
    if isinstance(feature.mapping, Vocabulary) and load_vocabulary(feature.mapping.path).text != is_text(kind):
        ids = "integers" if is_text(kind) else "strings"
        raise _wrong(f"{name}, whose vocabulary holds {ids},", f"{where}one of them", kind, file, feature.column)
    if feature.default is not None and isinstance(feature.default, str) != is_text(kind):
        wanted = "a string" if is_text(kind) else "an integer"
        raise DataError(
            f"{name}: default={feature.default!r} must be {wanted}, as the column's ids are",
            file=file,
            column=feature.column,
            fix="give a default of the column's type",
        )


def _wrong(what: str, wanted: str, found: pa.DataType, file: str, column: str, fix: str | None = None) -> DataError:
    return DataError(
        f"{what} must be {wanted}; the column's type is {found}",
        file=file,
        column=column,
        fix=fix or "convert the column, or change the feature's kind or column in the schema",
    )
