"""Tables of Delta Lake and Iceberg on a local S3 server: which server, where its files are, whatever their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrec.data import DataSet
from rayrec.data.source.lake import uri_of
from rayrec.storage.locations import Server, open_filesystem
from tests.data.test_lake import ids_of, rows

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


@pytest.fixture(scope="module")
def options(server: str) -> str:
    """Those of a URI on the server; a bucket is there."""
    filesystem, _ = open_filesystem(f"s3://lake?endpoint_override={server}&scheme=http&allow_bucket_creation=true")
    filesystem.create_dir("lake")
    return f"endpoint_override={server}&scheme=http&region=us-east-1"


@pytest.mark.parametrize("by", ["the URI", "the environment"])
def test_a_delta_table_on_s3(options: str, server: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"s3://lake/delta by {by}/100%25"
    storage = Server.of(f"s3://lake?{options}").for_delta() | {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}
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
    catalog = load_catalog("remote", **settings, **Server.of(f"s3://lake?{options}").for_iceberg())
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.clicks", rows(0).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(rows(*range(6)))
    yield table, settings
    catalog.drop_table("db.clicks")
    catalog.close()


def test_an_iceberg_table_on_s3(iceberg: Any, options: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    table, settings = iceberg
    assert ids_of(DataSet(path=f"{table.metadata_location}?{options}", table="iceberg")) == [*range(6)]
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__REMOTE__{name.upper()}", value)
    in_catalog = DataSet(path="iceberg://remote/db.clicks", table="iceberg")
    for name in ("PYICEBERG_CATALOG__REMOTE__S3__ENDPOINT", "AWS_ENDPOINT_URL"):
        with monkeypatch.context() as here:
            here.setenv(name, f"http://{server}")
            here.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # which is read once a process
            assert ids_of(in_catalog, [["day", "=", "a b"]]) == [0, 3], f"the server is named by {name}"


def test_files_have_the_names_of_our_uris() -> None:
    assert uri_of("s3n://lake/a b/x%20y.parquet", "region=x") == "s3://lake/a%20b/x%2520y.parquet?region=x"
    assert uri_of("gs://lake/x.parquet", "region=x") == "gs://lake/x.parquet"
    assert uri_of("file:/tmp/a b", "") == uri_of("file:///tmp/a b", "") == uri_of("/tmp/a b", "") == "/tmp/a b"
