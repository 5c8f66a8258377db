"""`rayrec service`: what belongs to a service that runs elsewhere, or later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.options import path

app = typer.Typer(name="service", help="Manifests of a service, its end, and its versions.", no_args_is_help=True)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", parser=path, help="YAML file of a service.")]


@app.command()
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


@app.command()
def stop(name: Annotated[str, typer.Argument(help="Of the Serve application.")] = "rayrec") -> None:
    """End one application of the cluster at RAY_ADDRESS, and no other."""
    from rayrec.serve.on_ray import stop as end

    end(name)
    typer.echo(f"ended {name}")


@app.command()
def rollback(
    models: Annotated[Path, typer.Argument(metavar="PATH", parser=path, help="A folder of exports that is served.")],
    to: Annotated[str | None, typer.Option(help="The version's folder; default: the one before.")] = None,
) -> None:
    """Serve an earlier version (or any: --to) of a folder of exports; its name stays in the file `current`."""
    from rayrec.serve.versions import switch

    before, now = switch(models, to)
    typer.echo(f"{models}: {now} instead of {before}, at the services' next look")
