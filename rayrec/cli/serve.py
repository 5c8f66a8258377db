"""`rayrec export`, `predict`, `index`, `retrieve` and `serve`; `rayrec service …`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rayrec._runtime.stop_signals import STOP_SIGNALS
from rayrec.cli.options import AllowCode, WhichCheckpoint, path
from rayrec.cli.output import after_tower, next_is
from rayrec.cli.text_files import reads_text_files

if TYPE_CHECKING:
    from rayrec.inference import Parity
    from rayrec.serve.config import ServeConfig

FORMATS = "fp32, fp16, int8, int4, or AUTO: AUTO chooses each table's format by its measured loss of quality."
MODELS = (
    "PATH, NAME=PATH or NAME=PATH@SHARE; PATH (or a URI) is an export, or a folder of exports, which serves the newest."
)
service = typer.Typer(
    name="service", help="Print manifests of a service, stop it, or roll it back.", no_args_is_help=True
)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", parser=path, help="YAML file of a service.")]


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder, or a checkpoint of one; a path or a URI.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", parser=path, help="Folder to write; must not exist.")],
    tables: Annotated[str, typer.Option(help=FORMATS)] = "fp32",
    dense: Annotated[str, typer.Option(help="Number format of the dense layers: fp32 or bf16.")] = "fp32",
    target: Annotated[
        str,
        typer.Option(help="eager, or aoti: also native code for --march (half a minute; needs g++)."),
    ] = "eager",
    march: Annotated[
        str | None,
        typer.Option(help="With aoti: x86-64-v3 (default on x86), or native for this processor."),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="With AUTO: table bytes as a share of fp32, e.g. 0.2.")] = None,
    data: Annotated[str | None, typer.Option(help="Rows to compare scores on; default: the run's data.eval.")] = None,
    parity: Annotated[
        str, typer.Option(metavar="ROWS|all", help="Evaluation rows to compare scores on, sampled from all rows.")
    ] = "100000",
    calibrate: Annotated[
        str | None,
        typer.Option(help="Fit probabilities to the evaluation rows (--data): platt (scale and shift), or isotonic."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Keep an export that exceeds its limits or is slow.")] = False,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Export a trained model and verify its scores against the trainer's (parity.html in the folder).

    Of a retriever, this exports the query tower; `rayrec index` adds the items to search.
    """
    from rayrec._runtime.imports import quick_imports

    with quick_imports():
        from rayrec.inference import ExportOptions
        from rayrec.train.after.export import export_run
        from rayrec.train.run.mirror import run_here
        from rayrec.train.terminal import notice

    if parity != "all" and not parity.isdecimal():
        raise typer.BadParameter(f"{parity!r} is not a number of rows, nor all", param_hint="--parity")
    rows = None if parity == "all" else int(parity)
    settings = ExportOptions(
        tables=tables,
        dense=dense,
        target=target,
        march=march,
        budget=budget,
        parity=rows,
        calibrate=calibrate,
        force=force,
    )
    with run_here(source, notice) as run:
        exported = export_run(run, out, settings, data, allow_code=allow_code, checkpoint=checkpoint)
    typer.echo(f"read the checkpoint of step {exported.index.origin['step']}: {exported.index.origin['checkpoint']}")
    parity_report = exported.parity
    typer.echo(
        f"{exported.folder}: {exported.index.version}, {parity_report.bytes['tables']:,} bytes of tables "
        f"({parity_report.bytes['tables'] / parity_report.bytes['fp32']:.0%} of fp32)"
    )
    if dense != "fp32":
        typer.echo(
            f"{exported.index.bf16_parameters:,} of {exported.index.dense_parameters:,} dense parameters in bf16"
        )
    for label, values in (parity_report.calibration or {}).items():
        changes = [
            f"{text} {values[f'{name}_before']:.5f} → {values[f'{name}_after']:.5f}" for name, text in _CALIBRATED
        ]
        typer.echo(f"calibrated {label} ({calibrate}): {', '.join(changes)}")
    _show_parity(parity_report)
    if exported.index.inputs.query is None:
        next_is("rayrec", "serve", str(out))
    else:
        after_tower(source, checkpoint, str(out))


_CALIBRATED = (("logloss", "log loss"), ("ece", "calibration error"))


def publish(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT|EXPORT", help="A run, a checkpoint, or an export (also an index)."),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", parser=path, help="Folder of exports that services follow.")],
    tables: Annotated[str, typer.Option(help=FORMATS)] = "fp32",
    target: Annotated[str, typer.Option(help="eager, or aoti: also native code.")] = "eager",
    data: Annotated[str | None, typer.Option(help="Rows to compare scores on; default: the run's data.eval.")] = None,
    parity: Annotated[int, typer.Option(metavar="ROWS", help="Evaluation rows to compare scores on.")] = 1000,
    max_ne: Annotated[
        float | None, typer.Option(help="Publish only if the run's newest normalized entropy is at most this.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Keep an export that exceeds its limits or is slow.")] = False,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Add a version of a run to a folder of exports: the change since the newest one there, or a full export."""
    from rayrec._runtime.imports import quick_imports

    with quick_imports():
        from rayrec.inference import ExportOptions
        from rayrec.train.after.publish import publish_run
        from rayrec.train.run.mirror import run_here
        from rayrec.train.terminal import notice

    settings = ExportOptions(tables=tables, target=target, parity=parity, force=force)
    with run_here(source, notice) as run:
        made = publish_run(run, out, settings, data, max_ne, allow_code, checkpoint)
    if made.folder is None:
        typer.echo(f"the newest version in {out} is of the checkpoint of step {made.step} already")
        return
    kind = "full export" if made.delta is None else f"delta {made.delta.sequence} of {made.delta.base}"
    typer.echo(f"{made.folder}: {kind}, step {made.step}, {made.nbytes:,} bytes")


def _show_parity(parity: Parity) -> None:
    sampled = " sampled from all" if parity.sampled else ""
    if parity.overlap is None:
        metrics = [f"{name} {a or 0:.6f} trained, {b or 0:.6f} exported" for name, a, b, _ in parity.compared()]
        text = f"logits differ by at most {parity.logit_max:.2g}, {'; '.join(metrics)}"
    else:
        text = (
            f"queries differ by at most {parity.logit_max:.2g}; {parity.overlap:.1%} of the 10 best items are the same"
        )
    typer.echo(f"parity on {parity.rows:,} rows{sampled}: {text}")
    if parity.slow is not None:
        typer.echo(parity.slow)
    for problem in parity.problems:
        typer.echo(f"exceeds its limits: {problem}")


@reads_text_files
def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="An export, a folder of exports, or a run; path or URI.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet file, folder or glob.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder or URI for the predictions; on a cluster, on shared storage.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Ray workers with one CPU each; 0: this process only.")] = 0,
    columns: Annotated[str | None, typer.Option(help="Columns to keep, as user,item; default: all.")] = None,
    bad_rows: Annotated[
        Literal["error", "skip"], typer.Option(help="error: stop at the first bad row; skip: predict null for it.")
    ] = "error",
    bad_rows_limit: Annotated[int, typer.Option(min=0, help="With skip: stop after more bad rows than this.")] = 1000,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Score Parquet files: each row once, with its columns. Run the same command again to resume."""
    from rayrec.inference.predict import predict as score
    from rayrec.train.after.export import exported_run
    from rayrec.train.run.mirror import holds, run_here
    from rayrec.train.terminal import notice

    if holds(model, "config.yaml"):
        with run_here(model, notice) as run:
            model = str(exported_run(run, allow_code, checkpoint, tell=typer.echo))
    elif checkpoint != "newest":
        raise typer.BadParameter(f"--checkpoint {checkpoint}: {model} is an export, which has one checkpoint")
    names = columns.split(",") if columns else None
    done = score(model, data, out, columns=names, workers=workers, bad_rows=bad_rows, bad_rows_limit=bad_rows_limit)
    typer.echo(f"{out}: {done.rows:,} rows in {done.parts} files, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    for reason, count in done.skipped.items():
        typer.echo(f"{count:,} rows without prediction: {reason}")


@reads_text_files
def index(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ITEMS|INDEX",
            help="Run or checkpoint of a retriever, or Parquet with one item vector per row; with --ranker also an "
            "index, for one with another ranker.",
        ),
    ],
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="New folder for the export with its index.")],
    items: Annotated[
        str | None, typer.Option(help="For a RUN: Parquet of the items; default: all rows of its table.")
    ] = None,
    id_column: Annotated[str, typer.Option("--id", help="Column of unique item ids.")] = "item",
    vector: Annotated[str, typer.Option(help="List column of numbers: the item's vector.")] = "vector",
    search: Annotated[str, typer.Option(help="exact, ivf or hnsw; the last two need rayrec[index].")] = "exact",
    recall: Annotated[float, typer.Option(help="Target recall of ivf or hnsw against exact search.")] = 0.98,
    k: Annotated[int, typer.Option(min=1, help="Items per query for which recall is measured.")] = 100,
    queries: Annotated[str | None, typer.Option(help="Parquet with a vector column, to tune ivf or hnsw.")] = None,
    tables: Annotated[
        str, typer.Option(help="For a RUN: format of the query tower's tables, fp32, fp16, int8 or int4.")
    ] = "fp32",
    tower: Annotated[
        Path | None,
        typer.Option(parser=path, help="For a RUN: take the query tower from this export of the same checkpoint."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="For a RUN: rows to compare and tune queries on; default: its data.eval.")
    ] = None,
    extend: Annotated[
        Path | None, typer.Option(parser=path, help="Start from the items, query tower and search of this index.")
    ] = None,
    ranker: Annotated[
        Path | None,
        typer.Option(parser=path, help="Export of a ranker, for requests that rank the items found (`rank`)."),
    ] = None,
    allow_code: AllowCode = False,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Export a retriever with an index of its items, or index given vectors.

    Other columns of the items become attributes to filter by, and to rank with.
    """
    from rayrec.checkpoint.manifest import MANIFEST
    from rayrec.inference import ExportOptions
    from rayrec.inference.artifact import INDEX
    from rayrec.inference.index import ItemIndex, Search, with_ranker, write_index
    from rayrec.inference.retrieve import read_vectors
    from rayrec.train.after.index import index_run
    from rayrec.train.run.mirror import holds, run_here
    from rayrec.train.terminal import notice

    settings = Search(kind=search, recall=recall, k=k)
    of_run: dict[str, object] = {"--items": items, "--tables": tables != "fp32", "--tower": tower, "--data": data}
    of_run |= {"--checkpoint": checkpoint != "newest", "--allow-code": allow_code}
    parity = None
    of_vectors: dict[str, object] = {"--queries": queries, "--extend": extend, "--vector": vector != "vector"}
    if holds(source, "config.yaml", MANIFEST):  # a run, or a checkpoint of one
        _refuse(of_vectors, f"{source} is a run")
        if tower is not None:
            _refuse({"--tables": tables != "fp32"}, f"the query tower is that of {tower}")
        with run_here(source, notice) as run:
            indexed = index_run(
                run,
                out,
                items,
                id_column,
                search=settings,
                options=ExportOptions(tables=tables),
                tower=tower,
                ranker=ranker,
                data=data,
                allow_code=allow_code,
                checkpoint=checkpoint,
            )
        written, parity = indexed.index, indexed.parity
    elif ranker is not None and holds(source, INDEX):
        _refuse({**of_run, **of_vectors, "--search": search != "exact"}, f"{source} is an index")
        written = with_ranker(source, out, ranker)
    else:
        _refuse(of_run, f"{source} holds item vectors, not a run")
        if extend is not None:
            _refuse({"--queries": queries, "--search": search != "exact"}, f"the index has the search of {extend}")
        vectors, table = read_vectors(source, vector, id_column)
        if extend is not None:
            written = ItemIndex(extend).extended(out, vectors, table, ranker)
        else:
            tuning = None if queries is None else read_vectors(queries, vector, None)[0]
            written = write_index(out, vectors, table, search=settings, queries=tuning, ranker=ranker)
    report = written.item_index(out)
    typer.echo(f"{out}: {report.items:,} items of {report.dim} numbers, {report.search} search, {written.version}")
    if written.ranker is not None:
        typer.echo(f"ranker: {written.ranker}")
    if report.left_out:
        typer.echo(
            f"left out: {report.left_out:,} items that the model does not know; train with them, then index again"
        )
    if parity is not None:
        _show_parity(parity)
    if report.recall is not None:
        typer.echo(
            f"recall@{report.k} {report.recall:.4f} of exact search, {report.speedup:.1f} times as fast, measured with "
            f"{report.tuned_on}"
        )
        target = report.target_recall or recall
        if report.recall < target:
            typer.echo(f"recall below the target of {target}: use --search exact")


def _refuse(options: dict[str, object], reason: str) -> None:
    """Raises a `ValueError` if one of the options is set."""
    for option, value in options.items():
        if value:
            raise ValueError(f"{reason}: remove {option}")


@reads_text_files
def retrieve(
    index: Annotated[
        str, typer.Argument(metavar="INDEX", help="An export with an index, or a folder of such; path or URI.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet file, folder or glob with one query per row.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Folder or URI for the results; on a cluster, on shared storage.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Ray workers with one CPU each; 0: this process only.")] = 0,
    k: Annotated[int, typer.Option(min=1, help="Items per row.")] = 100,
    history: Annotated[str | None, typer.Option(help="List column of item ids, oldest first.")] = None,
    vector: Annotated[str | None, typer.Option(help="List column of numbers: the query vector.")] = None,
    exclude: Annotated[str | None, typer.Option(help="List column of ids to exclude for a row.")] = None,
    keep_seen: Annotated[bool, typer.Option("--keep-seen", help="Allow items of the history in the results.")] = False,
    vectors: Annotated[bool, typer.Option("--vectors", help="Also add the query vector of each row.")] = False,
    time: Annotated[
        str | None, typer.Option(help="Column of times at which each row asks, for a model that reads times.")
    ] = None,
) -> None:
    """Find the best items for each row; adds the columns `items` and `scores`. Run the same command again to resume.

    Without --history or --vector, the data must have the columns that the run was trained with.
    """
    from rayrec.inference.retrieve import RetrieveOptions
    from rayrec.inference.retrieve import retrieve as run

    settings = RetrieveOptions(
        k=k, history=history, vector=vector, keep_seen=keep_seen, exclude=exclude, vectors=vectors, time=time
    )
    done = run(index, data, out, settings, workers=workers, say=typer.echo)
    typer.echo(f"{out}: {done.rows:,} rows in {done.files} files, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
    if done.empty:
        typer.echo(f"{done.empty:,} rows without items: the model knows nothing of their history, or all is excluded")


def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL…]", help=MODELS)] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="YAML file that describes the service, instead of models and flags; --port still applies."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; default: no gRPC.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 1,
    cpus: Annotated[int, typer.Option(min=1, help="Cores per replica.")] = 1,
    queue: Annotated[int, typer.Option(min=1, help="Maximum queued requests per replica; further ones get 503.")] = 128,
    direct: Annotated[
        bool, typer.Option("--direct", help="Each replica listens on its own port, without HAProxy.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(parser=path, help="File with the token that requests must send (Authorization: Bearer …)."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="Export with an index for POST /retrieve, or a folder of such, which serves the newest; path or URI."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Serve application, unique on the cluster.")] = "rayrec",
    route: Annotated[str, typer.Option(help="Prefix of all paths, e.g. /ctr.")] = "/",
    watch: Annotated[float, typer.Option(min=0, help="Seconds between checks for newer versions; 0: never.")] = 5.0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run on the cluster of RAY_ADDRESS and exit; the service keeps running.")
    ] = False,
) -> None:
    """Serve exported models: POST /score, GET /schema, /healthz, /metrics, and the v2 protocol. Needs rayrec[serve]."""
    if config is not None:
        if models:
            raise ValueError(f"--config {config} names the models: give --config or MODEL, not both")
        from rayrec.serve.config import load_serve_config

        settings = load_serve_config(config)
        settings = settings if port is None else settings.model_copy(update={"port": port})
    else:
        clients = [] if token_file is None else [{"name": "default", "token_file": str(token_file.absolute())}]
        address: dict[str, Any] = {"host": host, "port": 8000 if port is None else port, "grpc_port": grpc_port}
        address |= {"name": name, "route": route, "direct": direct, "clients": clients, "limits": {"queue": queue}}
        index_path = index if index is None or "://" in index else str(Path(index).absolute())
        settings = _from_flags(models or [], **address, replicas=replicas, cpus=cpus, watch_s=watch, index=index_path)
    _serve(settings, detach)


def _from_flags(models: list[str], **flags: Any) -> ServeConfig:
    from rayrec.serve.config import ModelSpec, parse_config

    if not models and flags["index"] is None:
        raise ValueError("give a model (an export or a folder of exports), --index or --config")
    return parse_config({"models": [ModelSpec.parse(model) for model in models], **flags})


def _serve(settings: ServeConfig, detach: bool) -> None:
    from rayrec.serve.on_ray import serving

    stopped = threading.Event()
    with serving(settings, detach) as address:
        from rayrec.serve.example import request
        from rayrec.serve.versions import check_version

        names = ", ".join(sorted({spec.name for spec in settings.models})) or f"the index {settings.index}"
        token = Path(settings.clients[0].token_file) if settings.clients else None
        stop_hint = f"ends with `rayrec service stop {settings.name}`" if detach else "Ctrl-C ends it"
        typer.echo(f"serving {names} at {address} ({stop_hint})")
        if settings.models:
            version = check_version(settings.models[0].folder, settings.cache_bytes)
            typer.echo(f"next: {request(version, address, token)}")
        if detach:
            return
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.wait(1.0):
            pass


@service.command()
def manifest(
    config: ConfigFile,
    image: Annotated[
        str | None, typer.Option(help="Container image with rayrec[serve]: print a RayService for KubeRay.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:FOLDER", help="A volume claim (or secret:NAME:FOLDER); may be repeated."),
    ] = None,
    exports: Annotated[
        list[Path] | None,
        typer.Option("--export", help="A model's export on this machine, for the pods' memory; may be repeated."),
    ] = None,
) -> None:
    """Print the input of `serve deploy`, or a RayService (--image). Paths in the config are paths on the cluster."""
    from rayrec.serve.config import load_serve_config
    from rayrec.serve.manifest import deploy_text, ray_service

    loaded = load_serve_config(config)
    volumes = [(claim, folder) for claim, _, folder in (text.rpartition(":") for text in mount or [])]
    if not all(claim and folder.startswith("/") for claim, folder in volumes):
        raise ValueError("--mount: write CLAIM:FOLDER or secret:NAME:FOLDER, e.g. --mount models:/models")
    text = deploy_text(loaded) if image is None else ray_service(loaded, image, volumes, exports or ())
    typer.echo(text, nl=False)


@service.command()
def stop(name: Annotated[str, typer.Argument(help="Name of the Serve application.")] = "rayrec") -> None:
    """Stop one application on the cluster of RAY_ADDRESS."""
    from rayrec.serve.on_ray import stop as end

    end(name)
    typer.echo(f"ended {name}")


@service.command()
def rollback(
    models: Annotated[str, typer.Argument(metavar="PATH", help="Folder of exports that is served; path or URI.")],
    to: Annotated[str | None, typer.Option(help="Folder name of the version; default: the previous version.")] = None,
) -> None:
    """Serve the previous version of a folder of exports, or the one of --to; writes the file `current`."""
    from rayrec.serve.versions import switch

    previous, current = switch(models, to)
    typer.echo(f"{models}: {current} instead of {previous}; services switch at their next check")
