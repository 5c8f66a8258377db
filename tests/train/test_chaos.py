"""One run that meets every fault there is, in random order: it ends as if nothing had happened, and leaves nothing.

Then runs with a fixed number of workers that lose a node: they wait for room, or give up.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from data.synthetic.clicks import SyntheticSpec, write_files
from rayrec.models import DLRM, Batch
from rayrec.train import Display, Trainer, parse_config
from tests.inference.runs import command
from tests.s3 import Door, s3_server
from tests.train import chaos
from tests.train.row_log import assert_every_row_once, consumed
from tests.train.small import raw_config, whole_checkpoints, write_all

pytestmark = [pytest.mark.long(minutes=8), pytest.mark.timeout(1600)]

SPEC = SyntheticSpec(rows=40_000, files=5, row_group_rows=1000, single=4, multi=2, dense=3, largest=500, seed=3)
# More epochs than the faults take: a node that was added may be used only after Ray has tried several times.
EPOCHS, BATCH, STEP_S = 6, 128, 0.2
DYNAMIC = "id_1"
HANG_S = chaos.AWAY_S + 5.0  # waiting for the object store is no hang
Fault = Callable[[chaos.Supervised, float], None]
KEPT = {"config.yaml", "given.yaml", "run_id", "plan.json", "metrics.jsonl", "footers.arrow", "result.json",
        "report.html", "tensorboard", "checkpoints", ".lock"}  # fmt: skip


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[bool]:
    """A file system that is soon full, at `folder`; False where there is no permission to mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and not subprocess.run(mount, stderr=subprocess.DEVNULL).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def upload(server: str, folder: Path) -> int:
    """The synthetic job's files with the number of each training row; returns how many of those there are."""
    address = f"?endpoint_override={server}&scheme=http&region=us-east-1"
    store, _ = pafs.FileSystem.from_uri(f"s3://clicks{address}&allow_bucket_creation=true")
    store.create_dir("clicks")
    rows = 0
    for number, path in enumerate(write_files(SPEC, folder)):
        table, trains = pq.read_table(path), number < SPEC.files - 1
        ids = range(rows, rows + len(table)) if trains else [0] * len(table)
        rows += len(table) if trains else 0
        place = f"clicks/{'train' if trains else 'eval'}/{path.name}"
        numbered = table.append_column("row", pa.array(ids, pa.int64()))
        pq.write_table(numbered, place, filesystem=store, row_group_size=SPEC.row_group_rows)
    return rows


def config(address: str, rows: int, storage: Path, log: Path) -> dict[str, Any]:
    options = f"?endpoint_override={address}&scheme=http&region=us-east-1"
    schema: Any = SPEC.schema_dict()
    schema["sparse"].append({"name": "row", "mapping": {"kind": "identity"}})
    schema["sparse"][1]["mapping"] = {"kind": "dynamic", "evict": "lfu", "admit": {"min_count": 1}}
    sizes = {**SPEC.ids, "row": rows, DYNAMIC: 2048}  # in which no bucket is ever full
    arch = {"dense_arch": [16, 8], "over_arch": [16, 1]}
    return {
        "name": "chaos",
        "data": {
            "train": f"s3://clicks/train{options}",
            "eval": f"s3://clicks/eval{options}",
            "shuffle": {"rows": 1000, "windows": 2},
            "read": {"reader": "local"},
        },
        "schema": schema,
        "tables": [{"name": name, "rows": size, "dim": 8, "features": [name]} for name, size in sizes.items()],
        "model": {
            "factory": "tests.train.row_log:Attempted",
            "args": {"log": str(log), "seconds": STEP_S, **arch},
        },
        "optimizers": {"dense": {"kind": "adam", "lr": 0.003}, "sparse": {"kind": "rowwise_adagrad", "lr": 0.05}},
        "trainer": {
            "num_workers": [1, 2],
            "cpus_per_worker": 1.0,
            "threads_per_worker": 1,
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "checkpoint_every": 8,
            "hang_s": HANG_S,
        },
        "storage": {"path": str(storage)},
    }


def undisturbed(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The evaluation of the same job in one process that nothing happens to."""
    args = {**raw["model"]["args"], "log": str(folder / "undisturbed"), "seconds": 0.0}
    alone = {**raw, "model": {**raw["model"], "args": args}, "storage": {"path": str(folder / "undisturbed-runs")}}
    alone["trainer"] = {**raw["trainer"], "num_workers": 0, "checkpoint_every": None}
    result = Trainer(parse_config(alone), display=Display(Console(quiet=True))).fit()
    assert result.eval is not None
    return result.eval


def drawn_order(seed: int) -> list[Fault]:
    """All faults, in an order in which a node is lost before one comes, and none is taken away in between."""
    faults = random.Random(seed).sample(chaos.FAULTS, len(chaos.FAULTS))
    lost, came = faults.index(chaos.node_removed), faults.index(chaos.node_added)
    if came < lost:
        faults[lost], faults[came] = faults[came], faults[lost]
        lost, came = came, lost
    if lost < faults.index(chaos.node_preempted) < came:
        faults.remove(chaos.node_preempted)
        faults.append(chaos.node_preempted)
    return faults


def test_a_run_that_meets_every_fault_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The order is that of RAYREC_CHAOS_SEED."""
    seed = int(os.environ.get("RAYREC_CHAOS_SEED", "1"))
    disk, log, path = tmp_path / "disk", tmp_path / "rows", tmp_path / "config.yaml"
    with s3_server() as server, small_disk(disk, 48 << 20) as can_fill:
        door = Door(server)
        rows = upload(server, tmp_path / "files")
        raw = config(door.address, rows, disk, log)
        path.write_text(yaml.safe_dump(raw))
        run = chaos.Supervised(path, disk / "chaos", tmp_path / "log", door, patience_s=1200)
        try:
            with run.on_cluster():
                wanted = undisturbed(raw, tmp_path)
                run.event(("checkpoint",), 0.0)
                for fault in drawn_order(seed):
                    if can_fill or fault not in (chaos.disk_full, chaos.storage_read_only):
                        began = time.time()
                        fault(run, began)
                        print(f"{fault.__name__}: over after {time.time() - began:.1f} s, at {run.records()[-1]}")
                Path(f"{log}.fast").touch()
                assert run.ended() == 0
            assert_nothing_left(run)
            result = run.run.read_result()
            assert result is not None
            assert (result["epochs"], result["train"]["samples"]) == (EPOCHS, EPOCHS * rows)
            print(f"evaluation {result['eval']}, undisturbed {wanted}")
            assert abs(result["eval"]["auc"] - wanted["auc"]) < 0.003
            steps = consumed(log)
            assert len(steps) == result["steps"]
            assert_every_row_once(steps, rows, EPOCHS)
            assert_every_id_counted_once(run.run.path, tmp_path / "files")
        except BaseException:
            print(f"RAYREC_CHAOS_SEED={seed} draws this order again; the command said:\n{run.said()[-8000:]}")
            raise
        door.shut()
    if not can_fill:
        pytest.skip("all but two faults of the disk passed: no permission to mount a small file system for them")


def assert_every_id_counted_once(run: Path, files: Path) -> None:
    """Each id has one row, and as many lookups as training rows have it, whatever was lost and done again."""
    listed = [line.split(",") for line in command("ids", run).splitlines()[1:]]
    counts = {int(key): int(count) for _, key, _, count, _ in listed}
    trained = sorted(files.glob("*.parquet"))[:-1]  # the last file is evaluated
    ids = pa.chunked_array([chunk for path in trained for chunk in pq.read_table(path)[DYNAMIC].chunks])
    expected = {one["values"]: EPOCHS * one["counts"] for one in ids.value_counts().to_pylist()}
    assert len(listed) == len(counts) and counts == expected


def assert_nothing_left(run: chaos.Supervised) -> None:
    """No process, no file but those of a run that is done, no checkpoint that is not whole."""
    until = time.monotonic() + 120
    while (left := chaos.marked(run.mark)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, left
    assert {path.name for path in run.run.path.iterdir()} <= KEPT
    whole = {Path(place).name for place in whole_checkpoints(run.run.path)}
    assert 1 <= len(whole) <= 3, whole
    assert {path.name for path in Path(run.run.checkpoints).iterdir()} == {*whole, "attempt.json"}


class Slow(DLRM):
    """So that a run is still training when its node is taken away."""

    def forward(self, batch: Batch) -> Any:
        time.sleep(0.1)
        return super().forward(batch)


class Impatient(chaos.Supervised):
    """Ray gives up each wait for room after a second, and rayrec begins the next."""

    more_env: ClassVar[dict[str, str]] = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1"}


def config_of_slow(folder: Path, name: str, **changes: object) -> Path:
    args = {"dense_arch": [16, 8], "over_arch": [16, 1]}
    trainer = {"num_workers": 2, "cpus_per_worker": 1.0, "checkpoint_every": 4, "epochs": 4}
    raw = raw_config(
        folder,
        name=name,
        model={"factory": "tests.train.test_chaos:Slow", "args": args},
        **{f"trainer__{name}": value for name, value in {**trainer, **changes}.items()},
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.timeout(500)
def test_a_run_that_lost_a_node_waits_until_another_comes_or_its_limit(tmp_path: Path) -> None:
    """Through more waits of Ray Train's than it ends a run after by itself."""
    write_all(tmp_path, rows=1000)
    patient = config_of_slow(tmp_path, "patient")
    run = Impatient(patient, tmp_path / "runs" / "patient", tmp_path / "log", None, patience_s=300)
    with run.on_cluster():
        run.event(("checkpoint",), 0.0)
        run.tell_cluster("remove")
        time.sleep(12)
        run.must_go_on("room")
        run.tell_cluster("add")
        run.event(("recovered",), 0.0)
        assert run.ended() == 0, run.said()
        assert json.loads(run.run.result.read_text())["recoveries"] == 1

        run.follow(config_of_slow(tmp_path, "limited", wait_for_room_s=4), tmp_path / "runs" / "limited")
        run.event(("checkpoint",), 0.0)
        run.tell_cluster("remove")
        assert run.ended() == 1
    said = run.said()
    assert "No room for the workers within trainer.wait_for_room_s=4 s: 2 workers need 1 CPU each" in said
    assert "is intact; run the same command again to resume from it" in said
