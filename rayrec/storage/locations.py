"""Paths and URIs: the file system, the path inside it, and the URIs of its files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, quote, unquote, urlencode

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import AfterValidator

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.secrets import secret_in, without_credentials, without_secrets

_BUCKETS = ("s3", "gs", "gcs")
_LOCAL = pafs.LocalFileSystem()
_URI = re.compile(r"[A-Za-z][\w+.-]+:/")  # one slash: `pathlib` removes the second


@dataclass(frozen=True, slots=True)
class Location:
    """A file, folder or glob on a file system.

    Args:
        uri: the URI or path that the user gave.
        path: path inside the file system, decoded.
        root, base: prefixes of `uri` and `path` that all files of the file system share.
        options: query of the URI, such as `endpoint_override=…`.
        bucket: bucket name in object storage, otherwise None.
    """

    uri: str
    filesystem: pafs.FileSystem
    path: str
    root: str = ""
    base: str = ""
    options: str = ""
    bucket: str | None = None

    def uri_of(self, path: str) -> str:
        """The URI of another path on the same file system."""
        if not self.root:
            return path
        inner = escaped(path[len(self.base) :].lstrip("/"))
        return f"{self.root}/{inner}" + (f"?{self.options}" if self.options else "")


Place = Annotated[str, AfterValidator(without_credentials)]


def locate(uri: str) -> Location:
    """The file system and path of a path or URI.

    Raises:
        DataError: unknown scheme, missing library, or credentials in the URI.
    """
    scheme, is_uri, rest = uri.partition("://")
    if (problem := secret_in(uri)) is not None:
        raise DataError(problem)
    if not is_uri:
        return Location(uri, _LOCAL, str(Path(uri).expanduser().absolute()))
    rest, _, options = rest.partition("?")
    host, _, inner = rest.partition("/")
    root = f"{scheme}://{host}"
    try:
        filesystem, base = _filesystem(root, options)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot open this file system: {first_line(error)}", file=uri, fix=_fix(scheme)) from error
    path = f"{base.rstrip('/')}/{unquote(inner)}".rstrip("/")
    bucket = base.split("/")[0] if scheme in _BUCKETS else None
    return Location(uri, filesystem, path, root, base, options, bucket)


def local_path(path: str | os.PathLike[str]) -> Path:
    """A local path to write to. `pathlib` would turn a URI into a folder named `s3:`.

    Raises:
        DataError: the path is a URI.
    """
    text = os.fspath(path)
    if _URI.match(text):
        problem = f"{without_secrets(text)} is a URI, and only a local path is possible here"
        raise DataError(problem, fix="name a local file or folder, and copy it there")
    return Path(text)


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path inside it.

    Raises:
        DataError: as `locate`.
    """
    location = locate(uri)
    return location.filesystem, location.path


def inside(folder: str, name: str) -> str:
    """The path or URI of a name inside a folder."""
    base, mark, options = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{options}"


def escaped(path: str) -> str:
    """A path, percent-encoded for a URI."""
    return quote(path, safe="/=:@,+~!$&'();")


def plain_path(uri: str) -> str:
    """A URI decoded and without its options; a path unchanged."""
    return uri if "://" not in uri else unquote(uri.partition("?")[0])


@lru_cache(maxsize=64)
def _filesystem(root: str, options: str) -> tuple[pafs.FileSystem, str]:
    """Created once per process: for S3, each creation looks up the bucket's region over the network."""
    filesystem, base = pafs.FileSystem.from_uri((root if root[-1] != "/" else root + "/") + (options and f"?{options}"))
    return filesystem, str(base)


def _fix(scheme: str) -> str:
    if scheme in ("hdfs", "viewfs"):
        return (
            "install Java and Hadoop's client on every node, and set JAVA_HOME, HADOOP_HOME and "
            "CLASSPATH (`hadoop classpath --glob`) so that libjvm and libhdfs are found"
        )
    if scheme in _BUCKETS:
        return "check the URI and its options; pyarrow must be a build with this file system, as the wheels of PyPI are"
    return "use a path, or a URI of file://, s3://, gs:// or hdfs://"


@dataclass(frozen=True, slots=True)
class Server:
    """An object storage server, for libraries that do not read the options of rayrec's URIs.

    Args:
        endpoint: URL of the server; None for Amazon's.
        region: region name, or None if unknown.
    """

    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def of(cls, uri: str, endpoint: str | None = None, region: str | None = None) -> Server:
        """From the arguments, else from the options of the URI, else from the environment."""
        options, environment = dict(parse_qsl(uri.partition("?")[2])), os.environ
        if endpoint is None and "endpoint_override" in options:
            endpoint = f"{options.get('scheme', 'https')}://{options['endpoint_override']}"
        endpoint = endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = (
            region or options.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        )
        return cls(endpoint, region or ("us-east-1" if endpoint else None))

    def for_delta(self) -> dict[str, str]:
        """Storage options for `deltalake`."""
        unencrypted = {"AWS_ALLOW_HTTP": "true"} if (self.endpoint or "").startswith("http://") else {}
        return _known(AWS_ENDPOINT_URL=self.endpoint, AWS_REGION=self.region) | unencrypted

    def for_iceberg(self) -> dict[str, str]:
        """Properties for `pyiceberg`."""
        return _known(**{"s3.endpoint": self.endpoint, "s3.region": self.region})

    def options(self) -> str:
        """The query of a URI."""
        scheme, _, host = (self.endpoint or "").rpartition("://")
        return urlencode(_known(endpoint_override=host or None, scheme=scheme or None, region=self.region), safe=":/")


def _known(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def cache_folder(kind: str) -> Path:
    """The folder of this user's caches of a kind on this node. It may not exist or not be writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayrec" / kind
