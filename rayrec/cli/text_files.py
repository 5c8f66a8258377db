"""The options of all commands that read text files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_type_hints

import typer

_PANEL = "Text files (CSV, TSV, JSON)"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL, **more)


Text = str | None
Several = list[str] | None
# By the names of fields of TextOptions.
OPTIONS: dict[str, Any] = {
    "separator": Annotated[Text, _option("--separator", help="Text between cells. Default: found in the first lines.")],
    "header": Annotated[
        bool | None,
        _option(
            "--header/--no-header", help="The first line holds the names of columns. Default: found in the first lines."
        ),
    ],
    "names": Annotated[
        Several, _option("--names", metavar="NAME,…", help="Names of the columns, for files without a header line.")
    ],
    "encoding": Annotated[
        Text, _option("--encoding", help="E.g. latin-1 or utf-16. Default: UTF-8, or UTF-16 by its first bytes.")
    ],
    "quote": Annotated[
        Text, _option("--quote", help="Character around cells; '' if there is none. Default: a double quote.")
    ],
    "escape": Annotated[Text, _option("--escape", help="Character before a quote inside of quotes, e.g. a backslash.")],
    "nulls": Annotated[Several, _option("--null", metavar="TEXT", help="A cell that is null; may be repeated.")],
    "decimal": Annotated[Text, _option("--decimal", help="Decimal point of numbers. Default: a point.")],
    "thousands": Annotated[Text, _option("--thousands", help="Character between thousands. Default: none.")],
    "types": Annotated[
        Several,
        _option("--type", metavar="COLUMN=TYPE", help="Arrow type of a column, e.g. user=string; may be repeated."),
    ],
    "lists": Annotated[
        Several,
        _option(
            "--list", metavar="COLUMN=SEPARATOR", help="A column of lists, e.g. genres=| or tags=json; may be repeated."
        ),
    ],
    "times": Annotated[
        Several,
        _option("--time-format", metavar="COLUMN=FORMAT", help="A column of times, e.g. at=%d.%m.%Y; may be repeated."),
    ],
}


def reads_text_files(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of text files; they hold while it runs."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command)

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        given = {name: values.pop(_parameter(name)) for name in OPTIONS}
        with _reading({name: value for name, value in given.items() if value is not None}):
            return command(**values)

    more = [
        inspect.Parameter(_parameter(name), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in OPTIONS.items()
    ]
    parameters = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()
    ]
    with_options.__signature__ = own.replace(parameters=[*parameters, *more])  # type: ignore[attr-defined]
    with_options.__annotations__ = hints | {_parameter(name): option for name, option in OPTIONS.items()}
    return with_options


def _parameter(name: str) -> str:
    """The parameter of a command, apart from its own parameters."""
    return f"text_{name}"


@contextmanager
def _reading(given: dict[str, Any]) -> Iterator[None]:
    if not given:
        yield
        return
    from pydantic import ValidationError

    from rayrec.data.formats.text_options import NULLS, TextOptions, reading_text

    values = dict(given)
    for name, option in (("types", "--type"), ("lists", "--list"), ("times", "--time-format")):
        if name in values:
            values[name] = dict(_pair(option, text) for text in values[name])
    if "names" in values:
        values["names"] = [name.strip() for text in values["names"] for name in text.split(",")]
    if "nulls" in values:
        values["nulls"] = [*NULLS, *values["nulls"]]
    for name in ("separator", "escape"):
        if name in values:
            values[name] = {"\\t": "\t", "tab": "\t", "space": " "}.get(values[name], values[name])
    try:
        options = TextOptions.model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        name = str(first["loc"][0])
        name = {"nulls": "null", "types": "type", "lists": "list", "times": "time-format"}.get(name, name)
        raise typer.BadParameter(f"--{name}: {first['msg'].removeprefix('Value error, ')}") from None
    with reading_text(options):
        yield


def _pair(option: str, text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not (column and equals and value):
        raise typer.BadParameter(f"write {option} {text} as COLUMN=…, e.g. {option} user=string")
    return column, value
