"""`serve.yaml`: what a service is, as a file. The flags of `rayrec serve` are a short form of the same.

The same file makes the config of `serve deploy` and a KubeRay RayService (`manifest.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator

from rayrec.data.strict import Strict
from rayrec.serve.limits import Count, Limits, Positive
from rayrec.storage.cache import CACHE_BYTES
from rayrec.storage.errors import suggestion
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import without_credentials, without_secrets

LOOPBACK = ("127.0.0.1", "localhost")
LAST_PORT = 64_000
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
_WORD = r"[\w.-]+"


def _absolute(value: object, info: ValidationInfo) -> object:
    """A path that begins at the folder of the config."""
    if info.context is None or not isinstance(value, str) or "://" in value:
        return value
    return str((info.context / Path(value).expanduser()).absolute())


LocalFile = Annotated[str, BeforeValidator(_absolute)]
LocalPath = Annotated[Path, BeforeValidator(_absolute), Field(strict=False)]


def _place(value: object, info: ValidationInfo) -> object:
    """A URI as it is, else a path."""
    if isinstance(value, str) and "://" in value:
        return without_credentials(value)
    return Path(str(_absolute(value, info)))


class ModelSpec(Strict):
    """A model to serve.

    Args:
        name: by which requests ask for it; several entries of one name share its requests.
        path: an export, or a folder of exports of which the newest is served; a path or a URI.
        version: the folder below `path` to serve, whatever is newer; None: the newest.
        share: of the requests of this name, in relation to the others.
        shadow: it answers nobody: it scores `share` (0 to 1) of the requests again, and the difference is measured.
    """

    name: str = "default"
    path: Annotated[Path | str, BeforeValidator(_place)]
    version: str | None = None
    share: Positive = 1.0
    shadow: bool = False

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if not re.fullmatch(_WORD, self.name, re.ASCII):
            raise ValueError(f"{self.name!r}: a model's name is made of letters, digits, dots, dashes and underscores")
        if self.version is not None and not re.fullmatch(_WORD, self.version, re.ASCII):
            raise ValueError(f"version {self.version!r}: name a folder below {self.path}")
        if self.shadow and self.share > 1:
            raise ValueError(f"a shadow scores a share of 0 to 1 of the requests, not {self.share:g}")
        return self

    @property
    def folder(self) -> Path | str:
        """Where it is searched."""
        if self.version is None:
            return self.path
        return (
            self.path / self.version if isinstance(self.path, Path) else open_folder(self.path).sub(self.version).path
        )

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """From `PATH`, `NAME=PATH` or `NAME=PATH@SHARE`.

        Raises:
            ValueError: the share is no positive number, or the name cannot stand in a URL.
        """
        name, equals, rest = text.partition("=")
        if "://" in name:  # of a URI's options
            name, equals, rest = "default", "", text
        path, at, share = (rest if equals else text).rpartition("@")
        if not at:
            path, share = share, "1"
        try:
            return cls(
                name=name if equals else "default",
                path=path if "://" in path else Path(path).absolute(),
                share=float(share),
            )
        except ValueError as error:
            usage = "write a model as PATH, NAME=PATH or NAME=PATH@SHARE, e.g. ctr=exports/new@0.1"
            name_is_wrong = equals and not re.fullmatch(_WORD, name, re.ASCII)
            raise ValueError(f"{text!r}: {usage}" + (f"; {error}" if name_is_wrong else "")) from None


class ClientConfig(Strict):
    """Who may ask.

    Args:
        name: shown in metrics and logs; the token never is.
        token_file: holds the token, one word of ASCII; read where replicas run, and again when it changes.
        requests_per_s: of each replica; more are answered with 429. None: not limited.
        models: those that it may ask for; None: all.
    """

    name: str
    token_file: LocalFile
    requests_per_s: Positive | None = None
    models: tuple[str, ...] | None = Field(None, strict=False)


class TlsConfig(Strict):
    """PEM files, read where replicas run."""

    cert_file: LocalFile
    key_file: LocalFile


class LogConfig(Strict):
    """Requests and scores that are kept as Parquet; `feature_log.py` says how.

    Args:
        folder: holds a folder for each model; replicas may share it.
        share: of the requests, drawn by their ids.
        file_rows, file_s: a file is written when it has so many rows, or after so many seconds.
        files: of a model that are kept; the oldest go.
    """

    folder: LocalPath
    share: Annotated[float, Field(gt=0, le=1)] = 0.01
    file_rows: Count = 50_000
    file_s: Positive = 60.0
    files: Count = 1000


class ServeConfig(Strict):
    """A service.

    Args:
        models: what scores; the first is the default. There may be none where there is an index.
        name: of the Serve application; a cluster may run several services.
        route: prefix of all paths, "/" or such as "/ctr".
        host: who may reach it; the machine itself by default.
        port: of HAProxy, in front of all replicas; with `direct` of the first replica, the next one has the next.
        grpc_port: replicas of a machine share it; None: no gRPC.
        replicas: processes.
        cpus: cores of a replica.
        device: where scores are computed.
        direct: replicas answer HTTP themselves, at the lowest latency; one that is started anew may have another port.
        watch_s: seconds between two looks for newer versions; 0: never.
        batching: requests that wait are scored together; False: each alone.
        clients: who may ask; empty: everyone.
        log: requests and scores to keep, to train on; None: none are kept.
        cache_bytes: that copies of exports in object storage may take on a node.
        index: of `POST /retrieve`: an index, or a folder of indexes of which the newest by name is served.
    """

    models: tuple[ModelSpec, ...] = Field((), strict=False)
    name: Annotated[str, Field(pattern=rf"^{_WORD}$")] = "rayrec"
    route: Annotated[str, Field(pattern=r"^(/|(/[A-Za-z0-9_.-]+)+)$")] = "/"
    host: str = "127.0.0.1"
    port: Port = 8000
    grpc_port: Port | None = None
    replicas: Count = 1
    cpus: Count = 1
    device: Literal["cpu"] = "cpu"
    direct: bool = False
    watch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    limits: Limits = Limits()
    batching: bool = True
    clients: tuple[ClientConfig, ...] = Field((), strict=False)
    tls: TlsConfig | None = None
    log: LogConfig | None = None
    cache_bytes: Count = CACHE_BYTES
    index: LocalPath | None = None

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        if not self.models and self.index is None:
            raise ValueError("give models, or an index: there is nothing to serve")
        if self.host not in LOOPBACK and not self.clients:
            raise ValueError(f"host {self.host} lets others in: give clients with tokens, or keep to 127.0.0.1")
        if self.tls is not None and not self.direct:
            raise ValueError("tls needs direct: true: HAProxy, which stands in front otherwise, sends no certificate")
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError("two clients have one name: give each its own")
        answering = {model.name for model in self.models if not model.shadow}
        for model in self.models:
            if model.name not in answering:
                raise ValueError(f"model {model.name!r} has only shadows: one entry must answer")
        for client in self.clients:
            if unknown := sorted(set(client.models or ()) - answering):
                raise ValueError(f"client {client.name!r}: there is no model {unknown[0]!r}")
        return self


def load_serve_config(path: Path) -> ServeConfig:
    """Reads a file; paths in it begin at its folder.

    Raises:
        ValueError: it cannot be read, is not YAML, or has a field that is missing, unknown or wrong; a line for each.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"--config {path}: a mapping with the fields {', '.join(ServeConfig.model_fields)} is needed")
    try:
        return made_of(raw, path.absolute().parent)
    except ValueError as error:
        raise ValueError(f"--config {path}:\n{error}") from None


def made_of(raw: dict[str, Any], root: Path | None = None) -> ServeConfig:
    """A config of plain values; paths in it begin at `root`.

    Raises:
        ValueError: a line for each field that is wrong.
    """
    try:
        return ServeConfig.model_validate(raw, context=root)
    except ValidationError as error:
        raise ValueError("\n".join(_problems(error))) from None


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        place, given = ".".join(map(str, problem["loc"])), problem.get("input")
        text = problem["msg"].removeprefix("Value error, ")
        if isinstance(given, str | int | float):
            text += f", not {given!r}"
        if problem["type"] == "extra_forbidden":
            text = "unknown field" + suggestion(str(problem["loc"][-1]), ServeConfig.model_fields)
        lines.append(without_secrets(f"{place}: {text}" if place else text))
    return lines
