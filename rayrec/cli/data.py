"""`rayrec init` and `rayrec data …`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rayrec.cli.options import Config, Filters, Ids, Ignore, Keep, Labels, Lists, Numbers, Paths, Time, path, writing
from rayrec.cli.output import next_is
from rayrec.cli.text_files import reads_text_files

if TYPE_CHECKING:
    from rayrec.data.tools.check import CheckReport
    from rayrec.data.tools.init.stated_roles import StatedRoles

data = typer.Typer(help="Inspect, check and convert data before you train on it.", no_args_is_help=True)


@data.command()
@reads_text_files
def inspect(
    paths: Paths,
    rows: Annotated[int, typer.Option(help="Rows to read, spread over the files.", min=1)] = 500_000,
    filters: Filters = "[]",
    label: Labels = None,
    keep: Keep = None,
    time: Time = None,
    ids: Ids = None,
    numbers: Numbers = None,
    lists: Lists = None,
    ignore: Ignore = None,
    vocabularies: Annotated[
        Path | None,
        typer.Option(
            "--write-vocabularies",
            metavar="DIR",
            parser=path,
            help="Write a vocabulary for each column with few distinct ids.",
        ),
    ] = None,
) -> None:
    """Read a data set and propose its schema and table sizes, as YAML for a train config."""
    import yaml

    from rayrec.cli.output import show_columns
    from rayrec.data.formats.text_options import reading_text
    from rayrec.data.tools.init.inspect import inspect as look
    from rayrec.data.tools.init.text_files import find_text_options
    from rayrec.storage.files import find_files, format_of
    from rayrec.train.config.file import parse_yaml
    from rayrec.train.terminal import notice

    roles = _roles(ids, numbers, lists, ignore)
    options, lines = find_text_options([file.uri for file in find_files(paths) if format_of(file.uri)], roles)
    for line in lines:
        notice(line)
    with reading_text(options):
        inspection = look(paths, rows, parse_yaml(filters), label, keep or (), time, roles)
    show_columns(inspection, to_stderr=True)
    proposal = inspection.proposal(vocabularies=vocabularies)
    if written := options.model_dump(exclude_defaults=True):
        proposal = {"data": {"read": {"text": written}}, **proposal}
    typer.echo(yaml.safe_dump(proposal, sort_keys=False, default_flow_style=None, width=120))


@data.command()
@reads_text_files
def convert(
    sources: Annotated[list[str], typer.Argument(help="CSV, TSV, JSON lines, Avro or ORC files, folders or globs.")],
    out: Annotated[
        Path,
        typer.Argument(parser=path, help="Folder for the Parquet files; on a cluster, on shared storage."),
    ],
    rows_per_file: Annotated[int, typer.Option(help="Maximum rows per Parquet file.", min=1)] = 4 << 20,
    ray: Annotated[bool, typer.Option("--ray", help="Convert files in parallel, one Ray task each.")] = False,
) -> None:
    """Convert other formats to Parquet, which training reads; files may be of any size."""
    from rayrec.data.formats.convert import convert as run_convert
    from rayrec.data.formats.parquet_writer import Layout
    from rayrec.train.terminal import visible

    files = rows = 0
    layout = Layout(rows_per_file=rows_per_file)
    for done in run_convert(sources, out, layout=layout, on_ray=ray):
        typer.echo(f"{visible(done.source)}: {done.rows:,} rows{done.note and f'; {done.note}'}")
        files, rows = files + len(done.files), rows + done.rows
    typer.echo(f"{rows:,} rows in {files:,} Parquet files, in {out}")


@data.command()
@reads_text_files
def vocabulary(
    paths: Paths,
    out: Annotated[Path, typer.Option(parser=path, help="Parquet file to write; on a cluster, on shared storage.")],
    columns: Annotated[
        list[str],
        typer.Option(
            "--column",
            help="A column of ids, or of lists of ids; repeat it for features that share a table, such as an item and "
            "a history of items: the vocabulary then contains the ids of all of them.",
        ),
    ],
    filters: Filters = "[]",
    min_count: Annotated[int, typer.Option(help="Leave rarer ids out.", min=1)] = 1,
    max_size: Annotated[
        int | None, typer.Option(help="Maximum number of ids; the most frequent ones are kept.", min=1)
    ] = None,
    extend: Annotated[
        str | None,
        typer.Option(metavar="OLD", help="Keep the rows of this vocabulary's ids and append new ids."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Count files in parallel, one Ray task each.")] = False,
) -> None:
    """Count the ids of columns in all files, in bounded memory, and write a vocabulary, the most frequent ids first."""
    from rayrec.data.tools.vocabulary import count_column
    from rayrec.train.config.file import parse_yaml

    options = {"filters": parse_yaml(filters), "min_count": min_count, "max_size": max_size, "extend": extend}
    counts = count_column(paths, columns, out, **options, on_ray=ray)
    typer.echo(f"{counts.kept:,} of {counts.seen:,} {'new ' if extend else ''}ids in {out}")


@data.command()
def index(
    paths: Paths,
    out: Annotated[
        str | None, typer.Option(help="The file to write, for data.train.index; default: in the folder itself.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column", help="Keep minimum and maximum of this column for filters; may be repeated. Default: all."
        ),
    ] = None,
    table: Annotated[
        Literal["delta", "iceberg"] | None,
        typer.Option(help="The paths are tables; their newest version is read. Needs --out."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Read files in parallel on Ray.")] = False,
) -> None:
    """Store the footers of all files, so that runs read only the footers of new and changed files."""
    from rayrec.data.source.footers import write_index
    from rayrec.storage.parallel import start_ray

    if ray:
        start_ray()
    done = write_index(paths, out, columns, table)
    typer.echo(f"{done.files:,} files, {done.row_groups:,} row groups, {done.rows:,} rows in {done.path}")


@data.command()
@reads_text_files
def sequence(
    paths: Annotated[list[str], typer.Argument(help="An interaction log: Parquet files, folders or globs.")],
    out: Annotated[Path, typer.Option(parser=path, help="Folder for the Parquet files.")],
    user: Annotated[str, typer.Option(help="Column of the user.")],
    times: Annotated[
        list[str],
        typer.Option(
            "--time",
            metavar="COLUMN[=FORMAT]",
            help="Column of times: timestamps, dates or numbers. Texts must be ISO 8601, e.g. 2024-01-31 08:05, or "
            "have the FORMAT, as Python's strptime reads it, e.g. 'at=%m/%d/%Y %I:%M:%S %p', or as `init --time` "
            "takes it, e.g. at=yyyymmdd. Rows of one time do not see each other. May be repeated: the second column "
            "orders rows of one time by the first.",
        ),
    ],
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
        str | None,
        typer.Option(help="With --split time: first time of the test rows, written like those of the first --time."),
    ] = None,
    validation_from: Annotated[
        str | None, typer.Option(help="First time of the validation rows, before --test-from.")
    ] = None,
) -> None:
    """Make rows with histories from an interaction log; a history holds only events before its row's time."""
    from rayrec.data.tools.histories import Log, by_position, by_time, make_sequences
    from rayrec.data.tools.times import TimeColumn

    if (test_from is None) == (split == "time") or (validation_from is not None and test_from is None):
        raise typer.BadParameter("--split time and --test-from belong together, and --validation-from to both")
    divide = by_position if split == "position" else None if test_from is None else by_time(test_from, validation_from)
    log = Log(user=user, times=tuple(map(TimeColumn.parse, times)), columns=tuple(columns))
    for folder, count in make_sequences(paths, out, log, rows=rows, length=length, split=divide).items():
        typer.echo(f"{count:,} rows in {folder}")


@data.command()
@reads_text_files
def events(
    paths: Annotated[list[str], typer.Argument(help="The log: Parquet files, folders or globs, in any order.")],
    out: Annotated[Path, typer.Option(parser=path, help="Folder of the store, on a local disk.")],
    key: Annotated[str, typer.Option(help="Column of the keys, e.g. of users.")],
    time: Annotated[str, typer.Option(help="Column with the time of each event.")],
    columns: Annotated[
        list[str], typer.Option("--column", help="What sequences may read, e.g. the item; may be repeated.")
    ],
    unit: Annotated[Literal["s", "ms", "us", "ns"], typer.Option(help="Unit of integer times, from 1970.")] = "s",
    append: Annotated[bool, typer.Option("--append", help="Add the events to the store.")] = False,
    memory_gib: Annotated[float, typer.Option(help="About the most memory to use, in GiB.", min=0.001)] = 2.0,
) -> None:
    """Build a store of events for data.events, in bounded memory; run the command again after an interruption."""
    from rayrec.data.tools.event_store import StoreSpec, build_store

    spec = StoreSpec(key, time, tuple(columns), unit)
    done = build_store(
        paths, out, spec, append=append, memory_bytes=int(memory_gib * (1 << 30)), on_progress=typer.echo
    )
    added = f"{done.added:,} added, " if append else ""
    each = done.nbytes / max(1, done.events)
    typer.echo(f"{added}{done.events:,} events of {done.keys:,} keys in {out}, {each:.1f} bytes each")


@data.command()
def join(
    log: Annotated[Path, typer.Argument(metavar="LOG", parser=path, help="Folder of a service's feature log.")],
    events: Annotated[
        Path,
        typer.Argument(metavar="EVENTS", parser=path, help="Folder of Parquet files with label events: key and time."),
    ],
    window: Annotated[str, typer.Option(help="How long a row waits for events, e.g. 30m or 1h.")],
    out: Annotated[Path, typer.Option(parser=path, help="Folder of the joined rows and of the join's state.")] = Path(
        "joined"
    ),
    late: Annotated[
        Literal["correct", "drop", "reweigh"],
        typer.Option(
            help="A positive after the window: `correct` writes the row again, with a weight that takes the earlier "
            "negative back; `reweigh` writes it again and weights all negatives by the probability that they are "
            "real; `drop` counts it."
        ),
    ] = "correct",
    labels: Annotated[
        list[str] | None, typer.Option("--label", help="Column to write; may be repeated, with --kind. Default: label.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Column of the events with the name of the label. Default: each is a positive.")
    ] = None,
    keep: Annotated[str, typer.Option(help="How long after a row late positives are used.")] = "1d",
    lateness: Annotated[str, typer.Option(help="How much later than newer rows a row or an event may come.")] = "1m",
    idle: Annotated[
        str, typer.Option(help="How far log or events may be behind the other before they are not waited for.")
    ] = "1h",
    late_share: Annotated[
        float | None, typer.Option(help="With reweigh: share of positives that come late. Default: counted.")
    ] = None,
    request: Annotated[str, typer.Option(help="Column of the request id.")] = "_request",
    row: Annotated[str, typer.Option(help="Column of the row in the request.")] = "_row",
    time: Annotated[str, typer.Option(help="Column of the time.")] = "_time",
    unit: Annotated[Literal["s", "ms", "us", "ns"], typer.Option(help="Unit of times that are numbers.")] = "s",
    final: Annotated[bool, typer.Option("--final", help="Nothing more comes: close all windows.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Join a service's feature log with label events, exactly once; run it again when new files have arrived."""
    from dataclasses import asdict

    from rayrec.data.live.join_files import FileJoin, Patience
    from rayrec.data.live.label_join import COUNTS, JoinSpec

    spec = JoinSpec(
        window_s=_seconds("--window", window),
        late=late,
        keep_s=max(_seconds("--keep", keep), _seconds("--window", window)),
        labels=tuple(labels or ("label",)),
        kind=kind,
        request=request,
        row=row,
        time=time,
        unit=unit,
        late_share=late_share,
    )
    patience = Patience(lateness_s=_seconds("--lateness", lateness), idle_s=_seconds("--idle", idle))
    with FileJoin(log, events, out, spec, patience) as joining:
        done = joining.run(final=final)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    typer.echo(
        f"{done.rows:,} rows from {done.files:,} new files in {out}; {done.waiting:,} rows wait for their window"
    )
    typer.echo(
        "".join(f"  {done.counts[name]:,} {text}\n" for name, text in COUNTS.items() if done.counts[name]), nl=False
    )


def _seconds(option: str, text: str) -> int:
    """Seconds of a duration; `30m` is 30 minutes."""
    from rayrec.data.mapping.rules import duration_s

    seconds = duration_s(re.sub(r"(?<=[0-9 ])m$", "min", text))
    if seconds is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 30m, 1h, 90s or 2d", param_hint=option)
    return seconds


@data.command()
def fit(
    config: Config,
    out: Annotated[Path, typer.Option(parser=path, help="The config to write, with all statistics.")],
    again: Annotated[bool, typer.Option("--again", help="Recompute statistics that the config already has.")] = False,
    rows: Annotated[int, typer.Option(help="Rows to read, spread over the data.", min=1)] = 1_000_000,
    filters: Filters = "[]",
) -> None:
    """Compute the statistics of a schema (boundaries, means) from a config's training data, and write them into it."""
    import yaml

    from rayrec.data import DataSet, manifest_of
    from rayrec.data.formats.text_options import reading_text
    from rayrec.data.tools import fit as fitting
    from rayrec.train import load_config
    from rayrec.train.config.file import parse_yaml

    loaded, extra = load_config(config), parse_yaml(filters)
    if loaded.data.windowed and not extra:
        raise typer.BadParameter(
            "--filters: with data.order or data.progressive, --filters must name the days to compute statistics from"
        )

    def narrowed(data_set: Any) -> Any:
        return data_set.model_copy(update={"filters": [*data_set.filters, *extra]})

    train = loaded.data.train
    schema = fitting.without_statistics(loaded.data_schema) if again else loaded.data_schema
    waiting = fitting.unfitted_names(schema)
    reading = fitting.for_reading(schema).for_training
    with reading_text(loaded.data.read.text):
        data = manifest_of(narrowed(train) if isinstance(train, DataSet) else [*map(narrowed, train)], reading)
    fitted = fitting.fit(data, schema, rows)
    with writing("--out", out):
        raw = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        raw["schema"] |= fitting.statistics(fitted)
        out.write_text(yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8")
    typer.echo(f"fitted {', '.join(waiting) or 'nothing'} to {data.rows:,} training rows (before filters), in {out}")


@data.command()
def check(
    config: Config,
    rows: Annotated[
        int | None, typer.Option(help="Approximate number of rows to read, spread over the files; default: all.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Map a config's training data; report bad rows, nulls, collisions, list lengths. Exit status 1 on bad rows."""
    from rayrec.data import manifest_of
    from rayrec.data.formats.text_options import reading_text
    from rayrec.data.tools.check import check as run_check
    from rayrec.train import load_config
    from rayrec.train.setup import build
    from rayrec.train.setup.init_from import with_row_laws

    loaded = load_config(config)
    # As a new run maps the ids; the run that it may start from has no part in this.
    schema = with_row_laws(loaded.model_copy(update={"init_from": None})).data_schema.for_training
    bad = loaded.data.read.bad_rows
    with reading_text(loaded.data.read.text):
        data = manifest_of(loaded.data.train, schema)
    report = run_check(data, schema, build.rows_of(loaded), bad, rows)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print_check(report)
    if report.bad_rows:
        raise typer.Exit(1)


def _print_check(report: CheckReport) -> None:
    from rich.console import Console

    from rayrec.cli.output import show
    from rayrec.train.terminal import plain, table

    console = Console()
    console.print(f"{report.rows:,} rows, {report.bad_rows:,} bad, {report.positives:,} with label 1")
    for reason, number in report.reasons.most_common():
        console.print(plain(f"  {number:,} × {reason}"), style="red")
    for sample in report.samples[:5]:
        console.print(plain(f"    {sample}"))
    features = table(
        "feature",
        "ids>",
        "nulls>",
        "different ids>",
        "table rows>",
        "rows used>",
        "collisions>",
        "hottest id>",
        "load on 8>",
    )
    for f in report.features:
        different = "many" if f.distinct_ids is None else f"{f.distinct_ids:,}"
        collisions = "?" if f.collisions is None else f"{f.collisions:,}"
        counts = (f"{f.ids:,}", f"{f.nulls:,}", different, f"{f.table_rows:,}", f"{f.used_rows:,}", collisions)
        load = f.skew(8)
        shares = ("", "") if load is None else (f"{f.hottest:.1%}", f"{load:.2f} ×")
        features.add_row(plain(f.name), *counts, *shares)
    show(features, console)
    console.print("load on 8: lookups of the busiest of 8 ranks over the mean, if the table is cut by rows")
    if report.numbers:
        numbers = table("number", "nulls>", "lowest>", "mean>", "highest>")
        for n in report.numbers:
            numbers.add_row(plain(n.name), f"{n.nulls:,}", *(f"{value:.5g}" for value in (n.lowest, n.mean, n.highest)))
        show(numbers, console)


@reads_text_files
def init(
    data: Annotated[
        list[str], typer.Argument(metavar="DATA…", help="Parquet, CSV, TSV, JSON lines, Avro or ORC: files or folders.")
    ],
    label: Labels = None,
    keep: Keep = None,
    time: Time = None,
    ids: Ids = None,
    numbers: Numbers = None,
    lists: Lists = None,
    ignore: Ignore = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the config and the run; default: the name of the first file.")
    ] = None,
) -> None:
    """Inspect data and write a config that trains on it, with some rows held out for evaluation."""
    import torch
    import yaml

    from rayrec._runtime.cgroup_limits import cpus
    from rayrec.cli.output import show_columns
    from rayrec.data.tools.init.make_config import Machine, removed_on_failure, start
    from rayrec.train.config.file import parse_config
    from rayrec.train.terminal import visible

    name = name or _name_of(data[0])
    if _name_of(name) != name:
        raise ValueError(
            f"--name {name}: use letters, digits, dashes and underscores only; try --name {_name_of(name)}"
        )
    file, folder = Path(f"{name}.yaml"), Path(f"{name}-data")
    for output in (file, folder):
        if output.exists():
            raise ValueError(f"{output} already exists: choose another --name or remove it")
    roles = _roles(ids, numbers, lists, ignore)
    machine = Machine(cores=int(cpus()), gpus=torch.cuda.device_count())
    with removed_on_failure(folder):
        started = start(
            data, name, folder, machine, label, lambda text: typer.echo(visible(text)), keep or (), time, roles
        )
        parse_config(started.config)
        show_columns(started.inspection, to_stderr=False)
        values = yaml.safe_dump(started.config, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
        with open(file, "x", encoding="utf-8") as out:
            head = [f"Made by `rayrec init`. `rayrec config {file}` shows it with all defaults.", *started.comments]
            out.write("".join(f"# {visible(line)}\n" for line in head) + values)
    typer.echo(f"wrote {file}" + (f" and {folder}" if folder.exists() else ""))
    next_is("rayrec", "train", str(file))


def _roles(
    ids: list[str] | None, numbers: list[str] | None, lists: list[str] | None, ignore: list[str] | None
) -> StatedRoles:
    return {"ids": ids or (), "numbers": numbers or (), "lists": lists or (), "ignore": ignore or ()}


def _name_of(path: str) -> str:
    """The name of a run, from a file or folder name."""
    stem = path.partition("?")[0].rstrip("/").rpartition("/")[2].partition(".")[0]
    name = re.sub(r"[^\w.-]+", "-", stem, flags=re.ASCII).strip("-._")
    return name or "first"
