"""`rayrec data …`: looking at data sets before training on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rayrec.cli.options import Config, Filters, Label, Paths, path, writing

if TYPE_CHECKING:
    from rayrec.data.tools.check import CheckReport

app = typer.Typer(help="Inspect, check and convert data before you train on it.", no_args_is_help=True)


@app.command()
def inspect(
    paths: Paths,
    rows: Annotated[int, typer.Option(help="How many rows to look at, spread over the files.", min=1)] = 500_000,
    filters: Filters = "[]",
    label: Label = None,
    vocabularies: Annotated[
        Path | None,
        typer.Option(
            "--write-vocabularies",
            metavar="DIR",
            parser=path,
            help="Write a vocabulary for each column of few ids.",
        ),
    ] = None,
) -> None:
    """Read a data set and propose its schema and table sizes, as YAML for a train config."""
    import yaml

    from rayrec.cli.tables import show_columns
    from rayrec.data.tools.init.inspect import inspect as look
    from rayrec.train.config.file import parse_yaml

    found = look(paths, rows, parse_yaml(filters), label)
    show_columns(found, to_stderr=True)
    typer.echo(
        yaml.safe_dump(found.proposal(vocabularies=vocabularies), sort_keys=False, default_flow_style=None, width=120)
    )


@app.command()
def convert(
    sources: Annotated[list[str], typer.Argument(help="CSV, TSV, JSON lines, Avro or ORC files, folders or globs.")],
    out: Annotated[
        Path,
        typer.Argument(parser=path, help="Folder for the Parquet files; on a cluster, one that every node sees."),
    ],
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="COLUMN=TYPE", help="E.g. user=string; may be repeated.")
    ] = None,
    rows_per_file: Annotated[int, typer.Option(help="Rows of a Parquet file, at most.", min=1)] = 4 << 20,
    header: Annotated[
        bool | None,
        typer.Option(help="Whether CSV files begin with the names of their columns; default: by their first lines."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Convert the files side by side, one Ray task each.")] = False,
) -> None:
    """Convert other formats to Parquet, which training reads; files may be of any size."""
    from rayrec.data.formats.convert import convert as run_convert
    from rayrec.data.formats.parquet_writer import Layout
    from rayrec.train.driver.terminal import visible

    pairs = [text.partition("=") for text in types or []]
    for column, equals, kind in pairs:
        if not (column and equals and kind):
            raise typer.BadParameter(f"write --type {column or kind} as COLUMN=TYPE, e.g. --type user=string")
    files = rows = 0
    layout = Layout(rows_per_file=rows_per_file)
    for done in run_convert(sources, out, types={c: k for c, _, k in pairs}, layout=layout, header=header, on_ray=ray):
        typer.echo(f"{visible(done.source)}: {done.rows:,} rows{done.note and f'; {done.note}'}")
        files, rows = files + len(done.files), rows + done.rows
    typer.echo(f"{rows:,} rows in {files:,} Parquet files, in {out}")


@app.command()
def vocabulary(
    paths: Paths,
    out: Annotated[
        Path, typer.Option(parser=path, help="The Parquet file to write; on a cluster, where every node sees it.")
    ],
    column: Annotated[str, typer.Option(help="A column of ids, or of lists of ids.")],
    filters: Filters = "[]",
    min_count: Annotated[int, typer.Option(help="Leave rarer ids out.", min=1)] = 1,
    max_size: Annotated[int | None, typer.Option(help="Keep so many ids, the most frequent ones.", min=1)] = None,
    extend: Annotated[
        str | None,
        typer.Option(metavar="OLD", help="Keep the ids of this vocabulary in their rows, append those it lacks."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Count the files side by side, one Ray task each.")] = False,
) -> None:
    """Count a column's ids in all files and write them as a vocabulary, the most frequent first; in bounded memory."""
    from rayrec.data.tools.vocabulary import count_column
    from rayrec.train.config.file import parse_yaml

    which = {"filters": parse_yaml(filters), "min_count": min_count, "max_size": max_size, "extend": extend}
    found = count_column(paths, column, out, **which, on_ray=ray)
    typer.echo(f"{found.kept:,} of {found.seen:,} {'new ' if extend else ''}ids in {out}")


@app.command()
def index(
    paths: Paths,
    out: Annotated[
        str | None, typer.Option(help="The file to write, for data.train.index; default: in the folder itself.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", help="Keep the ends of this column for filters; may be repeated. Default: all."),
    ] = None,
    table: Annotated[
        Literal["delta", "iceberg"] | None,
        typer.Option(help="The paths are tables, of which the newest version is read; give --out."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Read side by side on Ray.")] = False,
) -> None:
    """Store the footers of all files, so that runs read only those of new and changed files."""
    from rayrec.data.source.footers import write_index
    from rayrec.storage.parallel import start_ray

    if ray:
        start_ray()
    done = write_index(paths, out, columns, table)
    typer.echo(f"{done.files:,} files, {done.row_groups:,} row groups, {done.rows:,} rows in {done.path}")


@app.command()
def sequence(
    paths: Annotated[list[str], typer.Argument(help="An interaction log: Parquet files, folders or globs.")],
    out: Annotated[Path, typer.Option(parser=path, help="Folder for the Parquet files.")],
    user: Annotated[str, typer.Option(help="The column that says whose row it is.")],
    time: Annotated[str, typer.Option(help="The column that says when; rows of one time do not see each other.")],
    columns: Annotated[
        list[str], typer.Option("--column", help="What histories hold, e.g. the item; may be repeated.")
    ],
    rows: Annotated[
        Literal["impressions", "users"],
        typer.Option(help="A row of the log with the history before it, or a row a user with all of it."),
    ] = "impressions",
    length: Annotated[int, typer.Option(help="Longest history of an impression, the newest rows.", min=1)] = 50,
    split: Annotated[
        Literal["position", "time"] | None,
        typer.Option(help="Divide into train, validation and test: a user's two newest rows, or by --test-from."),
    ] = None,
    test_from: Annotated[
        str | None, typer.Option(help="With --split time: the moment from which on rows are for the test.")
    ] = None,
    validation_from: Annotated[str | None, typer.Option(help="An earlier one, for validation until the test.")] = None,
) -> None:
    """Make rows with histories of an interaction log; no row sees itself, its own moment, or the future."""
    from rayrec.data.tools.histories import Log, by_position, by_time, make_sequences

    if (test_from is None) == (split == "time") or (validation_from and not test_from):
        raise typer.BadParameter("--split time and --test-from belong together, and --validation-from to both")
    moments = [None if text is None else int(text) if text.isdigit() else text for text in (test_from, validation_from)]
    divide = by_position if split == "position" else None if moments[0] is None else by_time(moments[0], moments[1])
    log = Log(user=user, time=time, columns=tuple(columns))
    for folder, made in make_sequences(paths, out, log, rows=rows, length=length, split=divide).items():
        typer.echo(f"{made:,} rows in {folder}")


@app.command()
def fit(
    config: Config,
    out: Annotated[Path, typer.Option(parser=path, help="The config to write, with all statistics.")],
    again: Annotated[bool, typer.Option("--again", help="Compute those that the config has as well.")] = False,
    rows: Annotated[int, typer.Option(help="How many rows to look at, spread over the data.", min=1)] = 1_000_000,
    filters: Filters = "[]",
) -> None:
    """Compute the statistics of a schema (boundaries, means) from a config's training data, and write them into it."""
    import yaml

    from rayrec.data import DataSet, manifest_of
    from rayrec.data.tools import fit as fitting
    from rayrec.train import load_config
    from rayrec.train.config.file import parse_yaml

    loaded, extra = load_config(config), parse_yaml(filters)
    if loaded.data.progressive is not None and not extra:
        raise typer.BadParameter("--filters: training day by day sees days that the statistics must not; name them")

    def narrowed(one: Any) -> Any:
        return one.model_copy(update={"filters": [*one.filters, *extra]})

    train = loaded.data.train
    schema = fitting.without_statistics(loaded.data_schema) if again else loaded.data_schema
    waiting = fitting.unfitted_names(schema)
    reading = fitting.for_reading(schema).for_training
    data = manifest_of(narrowed(train) if isinstance(train, DataSet) else [*map(narrowed, train)], reading)
    fitted = fitting.fit(data, schema, rows)
    with writing("--out", out):
        raw = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        raw["schema"] |= fitting.statistics(fitted)
        out.write_text(yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8")
    typer.echo(f"fitted {', '.join(waiting) or 'nothing'} to {data.rows:,} training rows (before filters), in {out}")


@app.command()
def check(
    config: Config,
    rows: Annotated[
        int | None, typer.Option(help="Look at about so many rows, spread over the files; default: all.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Map a config's training data; report bad rows, nulls, collisions, list lengths. Exit status 1 on bad rows."""
    from rayrec.data import manifest_of
    from rayrec.data.tools.check import check as run_check
    from rayrec.train import load_config
    from rayrec.train.setup import build

    loaded = load_config(config)
    schema = loaded.data_schema.for_training
    bad = loaded.data.read.bad_rows
    report = run_check(manifest_of(loaded.data.train, schema), schema, build.rows_of(loaded), bad, rows)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print_check(report)
    if report.bad_rows:
        raise typer.Exit(1)


def _print_check(report: CheckReport) -> None:
    from rich.console import Console

    from rayrec.cli.tables import show
    from rayrec.train.driver.terminal import plain, table

    console = Console()
    console.print(f"{report.rows:,} rows, {report.bad_rows:,} bad, {report.positives:,} with label 1")
    for reason, number in report.reasons.most_common():
        console.print(plain(f"  {number:,} × {reason}"), style="red")
    for sample in report.samples[:5]:
        console.print(plain(f"    {sample}"))
    features = table("feature", "ids>", "nulls>", "different ids>", "table rows>", "rows used>", "collisions>")
    for f in report.features:
        different = "many" if f.distinct_ids is None else f"{f.distinct_ids:,}"
        collisions = "?" if f.collisions is None else f"{f.collisions:,}"
        counts = (f"{f.ids:,}", f"{f.nulls:,}", different, f"{f.table_rows:,}", f"{f.used_rows:,}", collisions)
        features.add_row(plain(f.name), *counts)
    show(features, console)
    if report.numbers:
        numbers = table("number", "nulls>", "lowest>", "mean>", "highest>")
        for n in report.numbers:
            numbers.add_row(plain(n.name), f"{n.nulls:,}", *(f"{value:.5g}" for value in (n.lowest, n.mean, n.highest)))
        show(numbers, console)
