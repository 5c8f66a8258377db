"""Options and arguments of several commands, and checks of local paths and output files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperOption


def path(value: str | Path) -> Path:
    """Parses an option that is a local path; refuses URIs before the command starts."""
    if isinstance(value, Path) or "://" not in value:
        return Path(value)
    from rayrec.storage.locations import local_path

    try:
        return local_path(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class OnceCommand(TyperCommand):
    """A command that refuses a second value of an option that has one: the last would replace the first silently.

    Its help shows square brackets as they are written. Typer reads help texts as rich markup, in which `[list]` is a
    style, and leaves it out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.rich_markup_mode == "rich":
            for described in (self, *self.params):
                if text := getattr(described, "help", None):
                    setattr(described, "help", escape(text))  # noqa: B010  # click's arguments declare no help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for parameter, count in Counter(order).items():
            if isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag and count > 1:
                raise typer.BadParameter(f"given {count} times; it has one value", ctx=ctx, param=parameter)
        return super().parse_args(ctx, args)


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `ValueError` that names the option and the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot write the file: {error.strerror}; name another path") from error


Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", parser=path, help="YAML file with the config; `rayrec config` lists its fields."),
]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run folder: <storage.path>/<name>, a path or a URI.")]

WhichCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="newest|whole|best|STEP",
        help="Checkpoint of the run: the newest, the newest undamaged one, the best by storage.keep_best, or a step.",
    ),
]

Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="COLUMN[=VALUE]|COLUMN>=NUMBER",
        help="Label to predict: a column of 0 and 1, or the value or numbers that count as 1; may be repeated. "
        "Default: chosen from the columns.",
    ),
]

Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN,…",
        help="Keep these columns as features although they seem to be known only after the label; may be repeated.",
    ),
]


def _role(text: str) -> Any:
    return Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN,…", help=f"{text}; may be repeated.", rich_help_panel="What columns are"),
    ]


Ids = _role(
    "Columns of ids, or of lists of ids. Other columns are guessed. Then columns that seem to be known only after the "
    "label are left out; a column that you name here needs --keep, too, to stay"
)
Numbers = _role("Columns of numbers, or of lists of numbers of one length")
Lists = _role(
    "Columns of lists of ids; texts in CSV files are divided by the separator that most of them have, or by --list"
)
Ignore = _role("Columns that are not used")

Time = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN[=FORMAT]",
        help="Column with the time of a row, by which rows are divided. FORMAT: s, ms, us or ns since 1970; yyyymmdd, "
        "yyyymmddhh, yyyymmddhhmm, yyyymmddhhmmss or yymmddhh; excel (days, as 45261.5); iso; or a format of strptime. "
        "Default: recognized by its values.",
    ),
]

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, e.g. trainer.num_workers=4; may be repeated."),
]

AllowCode = Annotated[bool, typer.Option("--allow-code", help="Import the model.factory that the run folder names.")]

Paths = Annotated[list[str], typer.Argument(help="Parquet files, folders or globs, local or URIs.")]

Filters = Annotated[
    str, typer.Option(help="Only rows that pass, as data.train.filters: '[[day, \">=\", 2024-01-01]]'.")
]
