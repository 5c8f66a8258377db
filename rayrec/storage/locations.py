"""Paths and URIs: which file system they mean, the path inside it, and how its files are named."""

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

_BUCKETS = ("s3", "gs", "gcs")
# A secret may hold slashes; digits and a slash after the colon are a port, as in hdfs://host:8020/a@b.
_USER_AND_SECRET = re.compile(r"(\b[a-z][\w+.-]*://)[^/:@\s]*:(?!\d+/)[^@\s]*@", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"((?:(?<=\?)|(?<=&))[\w.-]*(?:secret|password|token|credential|access_?key|account_?key|api_?key|sig)[\w.-]*)=[^&\s'\"]*",
    re.IGNORECASE,
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or give the machines a role)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
    "abfss": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
}
_LOCAL = pafs.LocalFileSystem()
_URI = re.compile(r"[A-Za-z][\w+.-]+:/")  # with one slash, as `pathlib` leaves it


@dataclass(frozen=True, slots=True)
class Location:
    """A file, folder or glob on a file system.

    Args:
        uri: as it was given.
        path: inside the file system, decoded.
        root, base: what uri and path begin with, alike for all files of the file system.
        options: the URI's query, e.g. `endpoint_override=…`.
        bucket: that it lies in, if it lies in object storage.
    """

    uri: str
    filesystem: pafs.FileSystem
    path: str
    root: str = ""
    base: str = ""
    options: str = ""
    bucket: str | None = None

    def uri_of(self, path: str) -> str:
        """How another path of the same file system is named."""
        if not self.root:
            return path
        inner = escaped(path[len(self.base) :].lstrip("/"))
        return f"{self.root}/{inner}" + (f"?{self.options}" if self.options else "")


def without_secrets(text: str) -> str:
    """A text with the credentials in its URIs starred out."""
    return _SECRET_OPTION.sub(r"\1=***", _USER_AND_SECRET.sub(r"\1***@", text))


def secret_in(uri: str) -> str | None:
    """What is wrong with a URI that holds credentials, and what to do; None for one without. It does not repeat them.

    URIs are written into configs, run folders, logs and reports, where no secret may be.
    """
    shown = without_secrets(uri)
    if shown == uri:
        return None
    scheme = uri.partition("://")[0]
    return (
        f"{shown} was given with credentials, which would be written into the run folder and logs; leave them out and "
        f"{_CREDENTIALS.get(scheme, 'give them to the storage client in the environment')}, on every node"
    )


def without_credentials(uri: str) -> str:
    """A URI of a config, as it is.

    Raises:
        ValueError: it holds credentials.
    """
    if (problem := secret_in(uri)) is not None:
        raise ValueError(problem)
    return uri


Place = Annotated[str, AfterValidator(without_credentials)]


def locate(uri: str) -> Location:
    """What a path or URI means.

    Raises:
        DataError: a scheme that pyarrow does not know, a library that it lacks, or credentials in the URI.
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


def local_path(given: str | os.PathLike[str]) -> Path:
    """A local path to write to; of a URI `pathlib` would make a folder `s3:` in the working folder.

    Raises:
        DataError: it is a URI.
    """
    text = os.fspath(given)
    if _URI.match(text):
        problem = f"{without_secrets(text)} is a URI, and only a local path is possible here"
        raise DataError(problem, fix="name a local file or folder, and copy it there")
    return Path(text)


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path inside it.

    Raises:
        DataError: as `locate`.
    """
    place = locate(uri)
    return place.filesystem, place.path


def inside(folder: str, name: str) -> str:
    """What has this name in a folder, as a path or URI."""
    place, mark, options = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{place.rstrip('/')}/{name}{mark}{options}"


def escaped(path: str) -> str:
    """A path as it stands in a URI."""
    return quote(path, safe="/=:@,+~!$&'();")


def plain_path(uri: str) -> str:
    """A URI's path as its file system has it, without escapes and options; a path as it is."""
    return uri if "://" not in uri else unquote(uri.partition("?")[0])


@lru_cache(maxsize=64)
def _filesystem(root: str, options: str) -> tuple[pafs.FileSystem, str]:
    """Made once a process: S3 asks the network for a bucket's region every time."""
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
    """Which server of object storage is meant, for libraries that do not read the options of our URIs.

    Args:
        endpoint: URL of a server of one's own; None is Amazon's.
        region: as it is known.
    """

    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def of(cls, uri: str, endpoint: str | None = None, region: str | None = None) -> Server:
        """As it is known, or the options of a URI say, or else the environment."""
        given, environment = dict(parse_qsl(uri.partition("?")[2])), os.environ
        if endpoint is None and "endpoint_override" in given:
            endpoint = f"{given.get('scheme', 'https')}://{given['endpoint_override']}"
        endpoint = endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = region or given.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        return cls(endpoint, region or ("us-east-1" if endpoint else None))

    def for_delta(self) -> dict[str, str]:
        """As `deltalake` takes it."""
        unencrypted = {"AWS_ALLOW_HTTP": "true"} if (self.endpoint or "").startswith("http://") else {}
        return _known(AWS_ENDPOINT_URL=self.endpoint, AWS_REGION=self.region) | unencrypted

    def for_iceberg(self) -> dict[str, str]:
        """As `pyiceberg` takes it."""
        return _known(**{"s3.endpoint": self.endpoint, "s3.region": self.region})

    def options(self) -> str:
        """As the options of a URI."""
        scheme, _, host = (self.endpoint or "").rpartition("://")
        return urlencode(_known(endpoint_override=host or None, scheme=scheme or None, region=self.region), safe=":/")


def _known(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def cache_folder(kind: str) -> Path:
    """Where this user's copies of a kind lie on this node; it need not be there, nor be writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayrec" / kind
