"""`rayrec serve`: models behind HTTP, on Ray Serve."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.options import path

MODELS = "PATH, NAME=PATH or NAME=PATH@SHARE; PATH is an export, or a folder of exports whose newest is served."


def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help=MODELS)],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    replicas: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    cpus: Annotated[int, typer.Option(min=1, help="Cores of a replica.")] = 1,
    queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait in a replica; more are answered with 503.")
    ] = 128,
    direct: Annotated[
        bool, typer.Option("--direct", help="Replicas answer themselves, each at a port of its own, without HAProxy.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(parser=path, help="File with the token that requests must carry (Authorization: Bearer …)."),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(parser=path, help="Of POST /retrieve: an index, or a folder of indexes whose newest is served."),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Of the Serve application; services on one cluster need different ones.")
    ] = "rayrec",
    route: Annotated[str, typer.Option(help="Prefix of all paths, e.g. /ctr.")] = "/",
    watch: Annotated[float, typer.Option(min=0, help="Seconds between two looks for newer versions; 0: never.")] = 5.0,
) -> None:
    """Serve exported models: POST /score, GET /schema, /healthz, /metrics. Needs rayrec[serve]."""
    from rayrec.data.storage.locations import local_path
    from rayrec.serve.example import request
    from rayrec.serve.limits import Limits
    from rayrec.serve.on_ray import LOOPBACK, Settings, read_token, serving
    from rayrec.serve.service import ModelSpec
    from rayrec.serve.versions import newest

    if host not in LOOPBACK and token_file is None:
        raise ValueError(f"--host {host} lets others in: give --token-file, or keep to 127.0.0.1")
    for model in models:
        for place in (model, model.partition("=")[2]):
            local_path(place)
    settings = Settings(
        models=tuple(ModelSpec.parse(model) for model in models),
        host=host,
        port=port,
        replicas=replicas,
        cpus=cpus,
        direct=direct,
        token=read_token(token_file),
        watch_s=watch,
        name=name,
        route=route,
        limits=Limits(queue=queue),
        index=index,
    )
    stopped = threading.Event()
    with serving(settings) as address:
        names = ", ".join(sorted({spec.name for spec in settings.models}))
        typer.echo(f"serving {names} at {address} (Ctrl-C ends it)")
        typer.echo(f"next: {request(newest(settings.models[0].path), address, token_file)}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.wait(1.0):
            pass
