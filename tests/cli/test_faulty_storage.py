"""Commands whose data lies in an object store that answers 503, is slow, or cuts connections off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec.cli import run
from tests.s3 import Faulty, s3_bucket
from tests.train import small


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    """Of URIs in a bucket with data to train on, and the same as CSV."""
    with s3_bucket("faulty") as found:
        filesystem, _ = pafs.FileSystem.from_uri(f"s3://faulty{found}")
        for part, rows in (("train", 300), ("eval", 120)):
            for number in range(2):
                where = f"faulty/{part}/{number}.parquet"
                pq.write_table(small.table(rows, seed=number), where, filesystem=filesystem)
        with filesystem.open_output_stream("faulty/csv/x.csv") as file:
            file.write("".join(["label,user\n", *(f"{n % 2},{n % 23}\n" for n in range(200))]).encode())
        yield found


COMMANDS = {
    "inspect": "data inspect {s3}/train{options}",
    "vocabulary": "data vocabulary {s3}/train{options} --column user --out {tmp}/words.parquet",
    "index": "data index {s3}/train{options} --out {s3}/index-{fault}.arrow{options}",
    "convert": "data convert {s3}/csv{options} {tmp}/made",
    "inspect csv": "data inspect {s3}/csv{options}",
    "check": "data check {tmp}/config.yaml",
}


@pytest.mark.parametrize("fault", ["503", "slow", "cut"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_outlasts_faults_of_storage(
    command: str, fault: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = options.removeprefix("?endpoint_override=").partition("&")[0]
    door = Faulty(server, fault)
    try:
        faulty = options.replace(server, door.address)
        raw = small.raw_config(tmp_path, trainer__epochs=1, name=f"{fault}")
        raw["data"] |= {part: f"s3://faulty/{part}{faulty}" for part in ("train", "eval")}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
        names = {"s3": "s3://faulty", "options": faulty, "tmp": tmp_path, "fault": fault}
        assert run(COMMANDS[command].format(**names).split()) == 0
        assert door.met, "it met the fault"
    finally:
        door.shut()
