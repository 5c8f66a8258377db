"""Documents the config fields from their types, for `rayrec config`, REFERENCE.md and error messages."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayrec._runtime.interval import Interval
from rayrec._runtime.strict import Section
from rayrec.models.arguments import args_of, listed_meaning
from rayrec.models.loss_config import RANKER_LOSSES, RETRIEVER_LOSSES
from rayrec.train.config.relaunch import rules_table

TYPE_NAMES = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    Interval: "steps or duration",
}
HEAD = ["| field | type | default | meaning |", "|---|---|---|---|"]


def config_reference() -> str:
    """All config fields in Markdown: a chapter per section, with path, type, default and description."""
    from rayrec.train.config.train_config import TrainConfig

    sections = {name: field for name, field in _fields(TrainConfig) if _models(field.annotation)}
    plain = [name for name, _ in _fields(TrainConfig) if name not in sections]
    rows = _without_repeats(_rows_by_path(TrainConfig))
    lines = [*HEAD, *(rows[name] for name in plain)]
    for name, field in sections.items():
        lines += ["", f"## {name}", "", f"{_sentence(_meaning(TrainConfig, name, field))}", "", *HEAD]
        lines += [row for path, row in rows.items() if re.match(rf"{name}(\[\])?\.", path)]
        if name == "model":
            lines += [*_losses(), *_model_args()]
        if name == "optimizers":
            lines += _sparse_optimizers()
    lines += ["", "## What may change between two launches of a run", "", *rules_table()]
    return "\n".join(lines)


def _rows_by_path(model: type[BaseModel]) -> dict[str, str]:
    """Field path → table row. A path that occurs in several members of a union lists all its types."""
    fields: dict[str, list[tuple[type[BaseModel], str, FieldInfo]]] = {}
    for path, owner, name, field in _rows(model, ""):
        fields.setdefault(path, []).append((owner, name, field))
    rows = {}
    for path, members in fields.items():
        kind = " or ".join(dict.fromkeys(_field_type(field) for _, _, field in members))
        owner, name, field = members[0]
        rows[path] = _row(path, kind, _default(field), _meaning(owner, name, field))
    return rows


def _without_repeats(rows: dict[str, str]) -> dict[str, str]:
    """Drop the fields of a section that equals an earlier one; its own row refers to that section."""
    fields: dict[str, dict[str, str]] = {}
    for path, row in rows.items():
        parent, _, name = path.rpartition(".")
        fields.setdefault(parent, {})[name] = row.replace(f"`{path}`", "", 1)
    repeats: dict[str, str] = {}
    for parent, cells in fields.items():
        if parent in rows:
            same = next(path for path, earlier in fields.items() if path in rows and cells.items() <= earlier.items())
            if same != parent:
                repeats[parent] = same
    for path in [path for path in rows if any(path.startswith(f"{parent}.") for parent in repeats)]:
        del rows[path]
    return rows | {path: f"{rows[path][:-2]}; fields as `{same}` |" for path, same in repeats.items()}


def _row(path: str, kind: str, default: str, meaning: str) -> str:
    escaped = meaning.replace("|", "\\|")
    return f"| `{path}` | {kind} | {default} | {escaped} |"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _model_args() -> list[str]:
    """A chapter of arguments per built-in model."""
    from rayrec.models import BUILT_IN

    lines = []
    for model in BUILT_IN:
        lines += ["", f"### model.args of {model}", "", *HEAD]
        for name, field in args_of(model).model_fields.items():
            meaning = (field.description or "").replace('"', "`")
            lines.append(_row(f"model.args.{name}", _field_type(field), _default(field), meaning))
    return lines


def _losses() -> list[str]:
    """The kinds of `model.loss` with their fields, and a table of all fields."""
    lines: list[str] = []
    fields: dict[str, FieldInfo] = {}
    for models, kinds in (("rankers", RANKER_LOSSES), ("retrievers", RETRIEVER_LOSSES)):
        lines += ["", f"### model.loss of {models}", "", "| kind | loss | fields |", "|---|---|---|"]
        for kind, section in kinds.items():
            own = {name: field for name, field in section.model_fields.items() if name != "kind"}
            meaning = " ".join((section.__doc__ or "").split())
            lines.append(f"| `{kind}` | {meaning} | {', '.join(f'`{name}`' for name in own) or 'none'} |")
            fields = own | fields
    lines += ["", *HEAD]
    return lines + [
        _row(f"model.loss.{name}", _field_type(field), _default(field), _meaning(Section, name, field))
        for name, field in fields.items()
    ]


def _sparse_optimizers() -> list[str]:
    """A chapter listing the fields that each sparse optimizer uses."""
    from rayrec.distributed.kernel import RULES
    from rayrec.optim.config import SparseOptimizerConfig

    kinds = get_args(SparseOptimizerConfig.model_fields["kind"].annotation)
    lines = ["", "### optimizers.sparse by kind", "", "All read `lr`, `weight_decay`, `schedule`; and:", ""]
    lines += ["| kind | reads |", "|---|---|"]
    for kind in kinds:
        names = sorted(RULES[kind].reads & set(SparseOptimizerConfig.model_fields))
        lines.append(f"| `{kind}` | {', '.join(f'`{name}`' for name in names) or 'nothing more'} |")
    return lines


def fields_at(location: Sequence[str | int]) -> list[str]:
    """Field names allowed at a location, for example `("tables", 0)`; empty if any name is allowed."""
    return list(dict.fromkeys(name for model in _models_at(location) for name, _ in _fields(model)))


def type_at(location: Sequence[str | int]) -> str:
    """The type of a field as text, e.g. "`true` or `false` or `auto`"."""
    if location and isinstance(location[-1], int):
        return type_at(location[:-1])
    fields = [field for model in _models_at(location[:-1]) for name, field in _fields(model) if name == location[-1]]
    return " or ".join(dict.fromkeys(_field_type(field) for field in fields)) or "another type"


def _models_at(location: Sequence[str | int]) -> list[type[BaseModel]]:
    from rayrec.train.config.train_config import TrainConfig

    models: list[type[BaseModel]] = [TrainConfig]
    keyed = False
    for step in location:
        if isinstance(step, int) or keyed:
            keyed = False
            continue
        fields = [field for model in models for name, field in _fields(model) if name == step]
        models = [model for field in fields for model in _models(field.annotation)]
        keyed = any(get_origin(_bare(field.annotation)) is dict for field in fields)
    return models


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield field.alias or name, field


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel], str, FieldInfo]]:
    """(path, model, field name, field) of every field below `model`. Unions can repeat a path."""
    for name, field in _fields(model):
        path = f"{prefix}{name}"
        inner = _models(field.annotation)
        if inner:
            origin = get_origin(_bare(field.annotation))
            path += "[]" if origin in (list, tuple) else ".<name>" if origin is dict else ""
        yield path, model, name, field
        for section in inner:
            yield from _rows(section, f"{path}.")


def _meaning(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """The description of a field, else its entry under `Args:` of the class, else the first line of its section."""
    if field.description:
        return " ".join(field.description.split())
    if listed := listed_meaning(model.__mro__, name):
        return listed.replace('"', "`")
    inner = _models(field.annotation)
    doc_lines = (inner[0].__doc__ or "").strip().splitlines() if inner else []
    return doc_lines[0].removesuffix(".") if doc_lines else ""


def _field_type(field: FieldInfo) -> str:
    return _type_text(field.annotation) + _limits(field.metadata)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models in an annotation, inside lists, dicts, unions and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Literal:
        return []
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _bare(annotation: Any) -> Any:
    """`annotation` without `Annotated` and without `| None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bare(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _bare(members[0])
    return annotation


def _type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0]) + _limits(args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(member) for member in args))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (list, tuple, Sequence):
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return f"mapping of {_type_text(args[1])}"
    if annotation is type(None):
        return "`null`"
    if annotation is Any:
        return "any"
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return "section"
        return TYPE_NAMES.get(annotation, annotation.__name__)
    return str(annotation)


def _limits(metadata: Sequence[Any]) -> str:
    limits = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            limits += [text for text in [_limits(item.metadata).strip()] if text]
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            bound = getattr(item, name, None)
            if bound is not None and not isinstance(item, FieldInfo):
                limits.append(f"{sign} {bound}")
    return f" {', '.join(limits)}" if limits else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or isinstance(value, BaseModel) or field.default_factory is not None:
        return ""
    if value in ({}, [], (), ""):
        return ""
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
