"""`rayrec serve`: models behind HTTP and gRPC, on Ray Serve; `rayrec service`: one that runs elsewhere, or later."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrec._runtime.stop_signals import STOP_SIGNALS
from rayrec.cli.options import path

if TYPE_CHECKING:
    from rayrec.serve.config import ServeConfig

MODELS = (
    "PATH, NAME=PATH or NAME=PATH@SHARE; PATH (or a URI) is an export, or a folder of exports whose newest is served."
)
service = typer.Typer(name="service", help="Manifests of a service, its end, and its versions.", no_args_is_help=True)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", parser=path, help="YAML file of a service.")]


def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL…]", help=MODELS)] = None,
    config: Annotated[
        Path | None,
        typer.Option(parser=path, help="YAML file with all of a service; flags and models then stay away, but --port."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; default: no gRPC.")] = None,
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
    detach: Annotated[
        bool, typer.Option("--detach", help="On the cluster of RAY_ADDRESS: the service outlives this command.")
    ] = False,
) -> None:
    """Serve exported models: POST /score, GET /schema, /healthz, /metrics, and the v2 protocol. Needs rayrec[serve]."""
    if config is not None:
        if models:
            raise ValueError(f"--config {config} names the models; give either it or MODEL")
        from rayrec.serve.config import load_serve_config

        settings = load_serve_config(config)
        settings = settings if port is None else settings.model_copy(update={"port": port})
    else:
        clients = [] if token_file is None else [{"name": "default", "token_file": str(token_file.absolute())}]
        place: dict[str, Any] = {"host": host, "port": 8000 if port is None else port, "grpc_port": grpc_port}
        place |= {"name": name, "route": route, "direct": direct, "clients": clients, "limits": {"queue": queue}}
        found = None if index is None else index.absolute()
        settings = _from_flags(models or [], **place, replicas=replicas, cpus=cpus, watch_s=watch, index=found)
    _serve(settings, detach)


def _from_flags(models: list[str], **flags: Any) -> ServeConfig:
    from rayrec.serve.config import ModelSpec, parse_config

    if not models and flags["index"] is None:
        raise ValueError("name a model (an export, or a folder of exports), or give --index or --config")
    return parse_config({"models": [ModelSpec.parse(model) for model in models], **flags})


def _serve(settings: ServeConfig, detach: bool) -> None:
    from rayrec.serve.on_ray import serving

    stopped = threading.Event()
    with serving(settings, detach) as address:
        from rayrec.serve.example import request
        from rayrec.serve.versions import check_version

        names = ", ".join(sorted({spec.name for spec in settings.models})) or f"the index {settings.index}"
        token = Path(settings.clients[0].token_file) if settings.clients else None
        how = f"ends with `rayrec service stop {settings.name}`" if detach else "Ctrl-C ends it"
        typer.echo(f"serving {names} at {address} ({how})")
        if settings.models:
            first = check_version(settings.models[0].folder, settings.cache_bytes)
            typer.echo(f"next: {request(first, address, token)}")
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
        str | None, typer.Option(help="Container with rayrec[serve]: print a RayService of KubeRay.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:FOLDER", help="A volume claim (or secret:NAME:FOLDER); may be repeated."),
    ] = None,
) -> None:
    """Print what `serve deploy` takes, or with --image a RayService; paths in the config are those of the machines."""
    from rayrec.serve.config import load_serve_config
    from rayrec.serve.manifest import deploy_text, ray_service

    loaded = load_serve_config(config)
    volumes = [(claim, folder) for claim, _, folder in (one.rpartition(":") for one in mount or [])]
    if not all(claim and folder.startswith("/") for claim, folder in volumes):
        raise ValueError("--mount: write CLAIM:FOLDER or secret:NAME:FOLDER, e.g. --mount models:/models")
    typer.echo(deploy_text(loaded) if image is None else ray_service(loaded, image, volumes), nl=False)


@service.command()
def stop(name: Annotated[str, typer.Argument(help="Of the Serve application.")] = "rayrec") -> None:
    """End one application of the cluster at RAY_ADDRESS, and no other."""
    from rayrec.serve.on_ray import stop as end

    end(name)
    typer.echo(f"ended {name}")


@service.command()
def rollback(
    models: Annotated[str, typer.Argument(metavar="PATH", help="A folder of exports that is served, or its URI.")],
    to: Annotated[str | None, typer.Option(help="The version's folder; default: the one before.")] = None,
) -> None:
    """Serve an earlier version (or any: --to) of a folder of exports; its name stays in the file `current`."""
    from rayrec.serve.versions import switch

    before, now = switch(models, to)
    typer.echo(f"{models}: {now} instead of {before}, at the services' next look")
