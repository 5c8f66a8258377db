"""Tables of Delta Lake and Iceberg on a local S3 server: which server, where its files are, whatever their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from rayrec.data import DataSet
from tests.data.test_lake import ids_of, rows

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


@pytest.fixture(scope="module")
def options(server: str) -> str:
    """Those of a URI on the server; a bucket is there."""
    filesystem, _ = pafs.FileSystem.from_uri(
        f"s3://lake?endpoint_override={server}&scheme=http&allow_bucket_creation=true"
    )
    filesystem.create_dir("lake")
    return f"endpoint_override={server}&scheme=http&region=us-east-1"


@pytest.mark.parametrize("by", ["the URI", "the environment"])
def test_a_delta_table_on_s3(options: str, server: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"s3://lake/delta by {by}/100%25"
    storage = {"AWS_ENDPOINT_URL": f"http://{server}", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    storage["AWS_S3_ALLOW_UNSAFE_RENAME"] = "true"
    deltalake.write_deltalake(path, rows(*range(6)), partition_by=["day"], storage_options=storage)
    deltalake.write_deltalake(path, rows(6, 7), mode="append", storage_options=storage)
    if by == "the URI":
        path = f"{path}?{options}"
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
    assert ids_of(DataSet(path=path, table="delta", version=0)) == [*range(6)]
    newest = DataSet(path=path, table="delta").pinned()
    assert newest.version == 1 and ids_of(newest, [["day", "in", ["a b", "c/d"]]]) == [0, 1, 3, 4, 6, 7]


@pytest.fixture
def iceberg(tmp_path: Path, options: str, server: str) -> Any:
    """A table whose catalog is in a file and whose warehouse is on the server; the catalog's settings."""
    from pyiceberg.catalog import load_catalog

    settings = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": "s3a://lake/ware house"}
    catalog = load_catalog("remote", **settings, **{"s3.endpoint": f"http://{server}", "s3.region": "us-east-1"})
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.clicks", rows(0).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(rows(*range(6)))
    yield table, settings
    catalog.drop_table("db.clicks")
    catalog.close()


def test_an_iceberg_table_on_s3(
    iceberg: Any, options: str, server: str, monkeypatch: pytest.MonkeyPatch, catalogs: Callable[..., None]
) -> None:
    table, settings = iceberg
    assert ids_of(DataSet(path=f"{table.metadata_location}?{options}", table="iceberg")) == [*range(6)]
    settings = {f"REMOTE__{name.upper()}": value for name, value in settings.items()}
    in_catalog = DataSet(path="iceberg://remote/db.clicks", table="iceberg")
    for name in ("PYICEBERG_CATALOG__REMOTE__S3__ENDPOINT", "AWS_ENDPOINT_URL"):
        with monkeypatch.context() as here:
            here.setenv(name, f"http://{server}")
            catalogs(**settings)
            assert ids_of(in_catalog, [["day", "=", "a b"]]) == [0, 3], f"the server is named by {name}"
