"""Config fields for the arguments of built-in models, derived from their constructors and specs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model

from rayrec._runtime.strict import Section
from rayrec.models import BUILT_IN

# Arguments that the trainer supplies.
GIVEN = frozenset(
    {
        "self", "tables", "num_dense", "is_weighted", "task_weights", "label_kinds", "device", "tables_device",
        "attend", "loss", "dense_names",
    }
)  # fmt: skip
Described = tuple[str, Any, Any, str]  # name, type, default (... if required), description


@cache
def args_of(name: str) -> type[BaseModel]:
    """The pydantic model of `model.args` for a built-in model."""
    fields: dict[str, Any] = {
        argument: (_as_list(kind), Field(default=default, description=meaning))
        for argument, kind, default, meaning in _described(BUILT_IN[name])
        if argument not in GIVEN
    }
    return create_model(f"{name}_args", __base__=Section, **fields)


def _described(model: Any) -> Iterator[Described]:
    """The parameters of a class or function. `**inputs: Annotated[Any, SPEC, …]` expands to the fields of the specs
    that are not already parameters."""
    hints = get_type_hints(model if inspect.isfunction(model) else model.__init__, include_extras=True)
    parameters = inspect.signature(model).parameters
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for spec in get_args(hints[parameter.name])[1:]:
                yield from (field for field in _described(spec) if field[0] not in parameters)
        else:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            owners = model.__mro__ if inspect.isclass(model) else (model,)
            yield parameter.name, hints[parameter.name], default, listed_meaning(owners, parameter.name)


def with_defaults(model: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a built-in model with the defaults of all others, as plain values."""
    return args_of(model)(**args).model_dump(mode="json")


def wrong_args(model: str, args: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(argument, error kind, message) of unknown, missing and mistyped arguments."""
    try:
        args_of(model)(**args)
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["type"], e["msg"]) for e in error.errors(include_url=False)]
        # Unknown arguments first: a misspelt argument is also reported as missing.
        return sorted(problems, key=lambda problem: problem[1] != "extra_forbidden")
    return []


def _as_list(annotation: Any) -> Any:
    """`Sequence` as `list`, its type in YAML."""
    return list[get_args(annotation)] if get_origin(annotation) is Sequence else annotation  # type: ignore[misc]


def listed_meaning(owners: Sequence[Any], name: str) -> str:
    """The description of an argument in the first docstring that lists it under `Args:`; empty if none does."""
    for owner in owners:
        _, _, listed = (owner.__doc__ or "").partition("Args:\n")
        match = re.search(rf"^\s+{name}: (.*(?:\n {{12,}}\S.*)*)", listed, re.MULTILINE)
        if match:
            return " ".join(match.group(1).split()).removesuffix(".")
    return ""
