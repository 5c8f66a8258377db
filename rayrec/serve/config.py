"""`serve.yaml`: the config of a service. The flags of `rayrec serve` are a short form of it.

`manifest.py` turns the same config into the input of `serve deploy` and into a KubeRay RayService.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator

from rayrec._runtime.strict import Strict
from rayrec.serve.limits import Count, Limits, Positive
from rayrec.storage.cache import CACHE_BYTES
from rayrec.storage.errors import suggestion
from rayrec.storage.folder import open_folder
from rayrec.storage.secrets import without_credentials, without_secrets

LOOPBACK = ("127.0.0.1", "localhost")
LAST_PORT = 64_000
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
_WORD = r"[\w.-]+"


def _absolute(value: object, info: ValidationInfo) -> object:
    """Resolves a relative path against the folder of the config file."""
    if info.context is None or not isinstance(value, str) or "://" in value:
        return value
    return str((info.context / Path(value).expanduser()).absolute())


def _path_or_uri(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and "://" in value:
        return without_credentials(value)
    return Path(str(_absolute(value, info)))


LocalFile = Annotated[str, BeforeValidator(_absolute)]
LocalPath = Annotated[Path, BeforeValidator(_absolute), Field(strict=False)]


class ModelSpec(Strict):
    """A model to serve."""

    name: str = "default"
    """Name that requests use. Entries with the same name share its requests."""
    path: Annotated[Path | str, BeforeValidator(_path_or_uri)]
    """An export, or a folder of exports (serves the newest). A path or a URI."""
    version: str | None = None
    """Folder below `path` to serve, even when there are newer ones. None: the newest."""
    share: Positive = 1.0
    """Share of the requests for `name`, relative to the other entries with that name."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_shadow(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "shadow" in raw:
            fix = "remove the entry" if raw["shadow"] else "remove the field"
            raise ValueError(
                f"shadow versions no longer exist: {fix}; to compare an export with the one served, "
                "log requests (`log`) and score them with `rayrec predict`"
            )
        return raw

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if not re.fullmatch(_WORD, self.name, re.ASCII):
            raise ValueError(f"{self.name!r}: a model's name may have letters, digits, dots, dashes and underscores")
        if self.version is not None and not re.fullmatch(_WORD, self.version, re.ASCII):
            raise ValueError(f"version {self.version!r}: name a folder below {self.path}")
        return self

    @property
    def folder(self) -> Path | str:
        """The export, or the folder of exports, to load from."""
        if self.version is None:
            return self.path
        return (
            self.path / self.version if isinstance(self.path, Path) else open_folder(self.path).sub(self.version).path
        )

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Parses `PATH`, `NAME=PATH` or `NAME=PATH@SHARE`.

        Raises:
            ValueError: The share is not a positive number, or the name cannot be part of a URL.
        """
        name, equals, rest = text.partition("=")
        if "://" in name:  # the "=" belongs to the options of a URI
            name, equals, rest = "default", "", text
        path, separator, share = (rest if equals else text).rpartition("@")
        if not separator:
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
    """A client that may send requests."""

    name: str
    """Name in metrics and logs, which never contain the token."""
    token_file: LocalFile
    """File with the token, one ASCII word. Each replica reads it, and reads it again when it changes."""
    requests_per_s: Positive | None = None
    """Rate limit per replica; requests above it get 429. None: unlimited."""
    models: tuple[str, ...] | None = Field(None, strict=False)
    """Models that the client may use. None: all."""
    index: bool | None = None
    """May send `POST /retrieve`. None: unless `models` limits the client."""

    @property
    def retrieves(self) -> bool:
        """Whether the client may query the index."""
        return self.models is None if self.index is None else self.index


class TlsConfig(Strict):
    """TLS certificate and key, PEM files that each replica reads."""

    cert_file: LocalFile
    key_file: LocalFile


class LogConfig(Strict):
    """Log of requests and scores, as Parquet; see `feature_log.py`."""

    folder: LocalPath
    """Folder of the log, with one folder per model. Replicas may share it."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of the requests to log, sampled by request id."""
    file_rows: Count = 50_000
    """Rows of a file."""
    file_s: Positive = 60.0
    """Seconds after which a file is written, however few rows it has."""
    files: Count = 1000
    """Files to keep per model; older files are removed."""


class ServeConfig(Strict):
    """A service."""

    models: tuple[ModelSpec, ...] = Field((), strict=False)
    """Models; the first is the default. May be empty if there is an index."""
    name: Annotated[str, Field(pattern=rf"^{_WORD}$")] = "rayrec"
    """Name of the Serve application. A cluster may run several services."""
    route: Annotated[str, Field(pattern=r"^(/|(/[A-Za-z0-9_.-]+)+)$")] = "/"
    """Prefix of all paths, e.g. "/ctr"."""
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback need `clients`."""
    port: Port = 8000
    """Port of HAProxy, or with `direct` of the first replica; further replicas use the next ports."""
    grpc_port: Port | None = None
    """Port for gRPC, which the replicas of a machine share. None: no gRPC."""
    replicas: Count = 1
    """Processes."""
    autoscaling: dict[str, Any] | None = None
    """Fields of Ray Serve's `AutoscalingConfig`, such as `min_replicas`, `max_replicas` and `target_ongoing_requests`,
    for a number of replicas that follows the load; instead of `replicas`."""
    cpus: Count = 1
    """Cores per replica."""
    device: Literal["cpu"] = "cpu"
    """Device that computes the scores."""
    direct: bool = False
    """Replicas answer HTTP themselves, without HAProxy: lower latency, but a restarted replica may change its port."""
    watch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Interval between checks for newer versions, in seconds. 0: never."""
    limits: Limits = Limits()
    """Limits on requests and on the queue."""
    batching: bool = True
    """Scores requests that wait in one batch. False: each request separately."""
    clients: tuple[ClientConfig, ...] = Field((), strict=False)
    """Clients that may send requests. Empty: anyone may."""
    tls: TlsConfig | None = None
    """TLS; needs `direct`."""
    log: LogConfig | None = None
    """Log of requests and scores, as training data. None: no log."""
    cache_bytes: Count = CACHE_BYTES
    """Disk space per node for copies of exports from object storage, in bytes."""
    index: Annotated[Path | str, BeforeValidator(_path_or_uri)] | None = None
    """Export with an index for `POST /retrieve`, or a folder of exports (serves the newest). A path or a URI."""

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        if not self.models and self.index is None:
            raise ValueError("nothing to serve: set models, or an index")
        if self.host not in LOOPBACK and not self.clients:
            raise ValueError(f"host {self.host} accepts remote connections: set `clients`, or use 127.0.0.1")
        if self.tls is not None and not self.direct:
            raise ValueError("tls needs direct: true, because HAProxy does not serve a certificate")
        if self.autoscaling is not None:
            _check_autoscaling(self.autoscaling, self.replicas)
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError("two clients have the same name: names must be unique")
        models = {model.name for model in self.models}
        for client in self.clients:
            if unknown := sorted(set(client.models or ()) - models):
                raise ValueError(f"client {client.name!r}: unknown model {unknown[0]!r}")
        return self

    @property
    def min_replicas(self) -> int:
        """Replicas that always run."""
        return self.replicas if self.autoscaling is None else int(self.autoscaling.get("min_replicas", 1))

    @property
    def max_replicas(self) -> int:
        """Replicas that may run."""
        return self.replicas if self.autoscaling is None else int(self.autoscaling["max_replicas"])


def _check_autoscaling(fields: dict[str, Any], replicas: int) -> None:
    """Checks the fields by Ray Serve's own class.

    Raises:
        ValueError: Names the field.
    """
    from ray.serve.config import AutoscalingConfig

    if replicas != 1:
        raise ValueError("autoscaling sets the number of replicas: leave out `replicas`")
    if unknown := sorted(fields.keys() - AutoscalingConfig.model_fields.keys()):
        close = suggestion(unknown[0], AutoscalingConfig.model_fields)
        raise ValueError(f"autoscaling: Ray Serve's AutoscalingConfig has no field {unknown[0]!r}{close}")
    if fields.get("max_replicas") is None:
        raise ValueError("autoscaling needs `max_replicas`")
    try:
        parsed = AutoscalingConfig(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["autoscaling", *map(str, first["loc"])])
        raise ValueError(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None
    if not parsed.min_replicas:
        raise ValueError("autoscaling.min_replicas must be at least 1: without a replica, requests are refused")


def load_serve_config(path: Path) -> ServeConfig:
    """Reads a YAML file; relative paths in it start from its folder.

    Raises:
        ValueError: The file cannot be read or is not YAML, or a field is missing, unknown or wrong. One line per field.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"--config {path} must be a mapping with the fields {', '.join(ServeConfig.model_fields)}")
    try:
        return parse_config(raw, path.absolute().parent)
    except ValueError as error:
        raise ValueError(f"--config {path}:\n{error}") from None


def parse_config(raw: dict[str, Any], root: Path | None = None) -> ServeConfig:
    """Validates a config; relative paths in it start from `root`.

    Raises:
        ValueError: A field is missing, unknown or wrong. One line per field.
    """
    try:
        return ServeConfig.model_validate(raw, context=root)
    except ValidationError as error:
        raise ValueError("\n".join(_problems(error))) from None


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        field, value = ".".join(map(str, problem["loc"])), problem.get("input")
        text = problem["msg"].removeprefix("Value error, ")
        if isinstance(value, str | int | float):
            text += f", not {value!r}"
        if problem["type"] == "extra_forbidden":
            text = "unknown field" + suggestion(str(problem["loc"][-1]), ServeConfig.model_fields)
        lines.append(without_secrets(f"{field}: {text}" if field else text))
    return lines
