"""Griffe extension for the Python reference: parameters of pydantic classes, and one entry per documented name.

Griffe reads source code. It knows the parameters of dataclasses, but not those of pydantic classes. It also takes
`low, high: text` under `Args:` for one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)


class Fields(griffe.Extension):
    """Completes a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for member in _members(pkg):
            if member.docstring is not None:
                member.docstring.value = split_names(member.docstring.value)
            if isinstance(member, griffe.Class) and _is_model(member):
                _set_init(member)


def split_names(text: str) -> str:
    """Repeats the text of `a, b: text` in a docstring for each name."""
    return _NAMES.sub(lambda m: "\n".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(", ")), text)


def _members(parent: griffe.Object) -> Iterator[Any]:
    for member in list(parent.members.values()):
        if not member.is_alias:
            yield member
            if member.is_module or member.is_class:
                yield from _members(member)


def _bases(cls: griffe.Class) -> list[griffe.Class]:
    return [base for base in cls.resolved_bases if isinstance(base, griffe.Class)]


def _is_model(cls: griffe.Class) -> bool:
    return any(str(base) == "BaseModel" for base in cls.bases) or any(map(_is_model, _bases(cls)))


def _parameters(cls: griffe.Class) -> dict[str, griffe.Parameter]:
    """The fields of a pydantic class and its bases, by name."""
    fields: dict[str, griffe.Parameter] = {}
    for base in reversed(_bases(cls)):
        fields |= _parameters(base) if _is_model(base) else {}
    for name, member in cls.members.items():
        if not _is_field(member):
            continue
        name = _alias(member.value) or name
        fields[name] = griffe.Parameter(
            name,
            annotation=member.annotation,
            kind=griffe.ParameterKind.keyword_only,
            default=_default(member.value),
        )
    return fields


def _is_field(member: Any) -> bool:
    """Whether a member of a pydantic class is one of its fields. Griffe lists properties as attributes too."""
    return (
        member.is_attribute
        and member.annotation is not None
        and "property" not in member.labels
        and not str(member.annotation).startswith("ClassVar")
        and not member.name.startswith("_")
        and member.name != "model_config"
    )


def _alias(value: Any) -> str | None:
    """The name of a field in its class's constructor, if `Field(…)` sets another one."""
    if not isinstance(value, griffe.ExprCall):
        return None
    names = [a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword) and a.name == "alias"]
    return str(names[0]).strip("\"'") if names else None


def _default(value: Any) -> Any:
    """The default of a field, which may be inside `Field(…)`; None if the field is required."""
    if not isinstance(value, griffe.ExprCall) or str(value.function) != "Field":
        return value
    named = {a.name: a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword)}
    positional = [a for a in value.arguments if not isinstance(a, griffe.ExprKeyword)]
    if "default_factory" in named:
        return griffe.ExprCall(function=named["default_factory"], arguments=[])
    default = named.get("default", positional[0] if positional else None)
    return None if str(default) in ("...", "None") and "default" not in named and not positional else default


def _set_init(cls: griffe.Class) -> None:
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    parameters = griffe.Parameters(this, *_parameters(cls).values())
    init = griffe.Function("__init__", lineno=0, endlineno=0, parent=cls, parameters=parameters, returns="None")
    cls.set_member("__init__", init)
