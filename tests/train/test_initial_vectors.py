"""Runs whose tables start from vectors in files: whole configs, from Parquet to their first steps and a relaunch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from rayrec.data import DataError, Vocabulary
from rayrec.data.mapping.fingerprint import mapping_fingerprint
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.train import TrainError, parse_config
from rayrec.train.setup import build
from rayrec.train.setup.init_vectors import initial_vectors
from tests.ranks import on_ranks
from tests.train.small import fit_job, make_job, raw_config
from tests.train.test_checkpoints import fresh_vocabularies, tensors_of
from tests.train.test_fit import records, shown, trainer, write_all

STILL: dict[str, Any] = {
    "trainer__epochs": 1,
    "optimizers__sparse": {"kind": "sgd", "lr": 1e-12},
    "optimizers__dense": {"kind": "sgd", "lr": 1e-12},
}
SPREAD: dict[str, Any] = {"oov_rows": 2, "spread_over": 45}
VECTORS = np.random.default_rng(5).normal(size=(60, 8)).astype(np.float32)


def write_vectors(path: Path, ids: list[Any], vectors: Any = None) -> dict[str, str]:
    """A file with a vector for each id, and the section that names it."""
    numbers = VECTORS[: len(ids)] if vectors is None else vectors
    pq.write_table(pa.table({"user_id": ids, "embedding": numbers.tolist()}), path, row_group_size=7)
    return {"path": str(path), "id": "user_id", "vector": "embedding"}


def with_users(tmp_path: Path, init: Any) -> dict[str, Any]:
    """The schema and tables of the small config, with users 0 to 39 by a vocabulary from 39 down."""
    (tmp_path / "users.txt").write_text("".join(f"{user}\n" for user in range(39, -1, -1)))
    fresh_vocabularies()
    raw = raw_config(tmp_path)
    raw["schema"]["sparse"][0]["mapping"] = {"kind": "vocabulary", "path": str(tmp_path / "users.txt"), **SPREAD}
    raw["tables"][0] |= {"rows": 45, "init": init}
    return {name: raw[name] for name in ("schema", "tables")}


def table_of(run: Path, name: str) -> torch.Tensor:
    tensors = tensors_of(run)
    (key,) = (key for key in tensors if key.startswith("table/") and key.endswith(f".{name}"))
    return tensors[key]


def rows_of_users(users: Any) -> list[int]:
    rows: list[int] = vocabulary_rows(39 - np.array(users), Vocabulary(path="users.txt", **SPREAD)).tolist()
    return rows


def test_a_config_starts_a_table_from_the_vectors_of_a_file(tmp_path: Path) -> None:
    write_all(tmp_path)
    users = [*range(10, 40), 77, 78]  # without users 0 to 9; with two that have no row
    init = write_vectors(tmp_path / "vectors.parquet", users)
    run = trainer(tmp_path, name="vectors", **with_users(tmp_path, init), **STILL).fit()
    random = trainer(tmp_path, name="random", **with_users(tmp_path, None), **STILL).fit()
    started, at_random = table_of(run.folder, "user"), table_of(random.folder, "user")
    rows = rows_of_users(users[:30])
    torch.testing.assert_close(started[rows], torch.from_numpy(VECTORS[:30]))
    others = [row for row in range(45) if row not in rows]
    assert len(others) == 15
    torch.testing.assert_close(started[others], at_random[others])
    for name in ("item", "tag"):
        torch.testing.assert_close(table_of(run.folder, name), table_of(random.folder, name))
    text = f"table 'user': 30 of 45 rows start from {init['path']}; 2 ids are not in the vocabulary"
    assert [record["message"] for record in records(run.folder, "event") if record["event"] == "warm_start"] == [text]
    assert "30 of 45 rows start from" in shown(tmp_path)


def test_a_frozen_table_keeps_its_vectors(tmp_path: Path) -> None:
    write_all(tmp_path)
    init = write_vectors(tmp_path / "vectors.parquet", [*range(40)])
    for name, freeze in (("frozen", [{"names": "user"}]), ("trained", [])):
        run = trainer(tmp_path, name=name, optimizers__freeze=freeze, **with_users(tmp_path, init)).fit()
        rows = table_of(run.folder, "user")[rows_of_users(range(40))]
        assert torch.equal(rows, torch.from_numpy(VECTORS[:40])) == (name == "frozen")


def test_a_relaunch_does_not_need_the_file(tmp_path: Path) -> None:
    write_all(tmp_path)
    init = write_vectors(tmp_path / "vectors.parquet", [*range(40)])
    whole = trainer(tmp_path, name="whole", trainer__epochs=2, **with_users(tmp_path, init)).fit()
    trainer(tmp_path, trainer__epochs=1, **with_users(tmp_path, init)).fit()
    (tmp_path / "vectors.parquet").unlink()
    # It is read no more, so it may have another name, or none.
    for epochs, other in ((2, {**init, "path": "moved.parquet"}), (3, None)):
        run = trainer(tmp_path, trainer__epochs=epochs, **with_users(tmp_path, other)).fit()
        assert run.epochs == epochs
        if epochs == 2:
            assert torch.equal(table_of(run.folder, "user"), table_of(whole.folder, "user"))
    assert len([record for record in records(run.folder, "event") if record["event"] == "warm_start"]) == 1


def fit_on_ranks(group: dist.ProcessGroup, raw: dict[str, Any]) -> None:
    """A run on the ranks of the test pool, as the driver would hand it to them. Only rank 0 can read the vectors."""
    config = parse_config(raw)
    mapping = mapping_fingerprint(config.data_schema, build.rows_of(config))
    vectors = initial_vectors(config, mapping)
    if group.rank():
        absent = tuple(replace(file, uri=f"{file.uri}.absent") for file in vectors[0].files.files)
        vectors = (replace(vectors[0], files=replace(vectors[0].files, files=absent)),)
    fit_job(replace(make_job(raw), vectors=vectors), group)


def test_ranks_start_from_the_same_table_as_a_single_process(tmp_path: Path) -> None:
    """The files are read by one rank of a host, also for tables without a row on it."""
    write_all(tmp_path, rows=200)
    users = [*range(5, 40), 91]
    init = write_vectors(tmp_path / "vectors.parquet", users)
    how = {**with_users(tmp_path, init), **STILL}
    alone = table_of(trainer(tmp_path, name="alone", **how).fit().folder, "user")
    torch.testing.assert_close(alone[rows_of_users(users[:35])], torch.from_numpy(VECTORS[:35]))
    for kind in ("row_wise", "column_wise", "table_wise", "data_parallel"):
        constraints = {"user": {"sharding_types": [kind], "min_partition": 4}}
        on_ranks(2, fit_on_ranks, raw_config(tmp_path, name=kind, sharding={"constraints": constraints}, **how))
        torch.testing.assert_close(table_of(tmp_path / "runs" / kind, "user"), alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vectors": np.ones((40, 7))},
            r"7 numbers, but the table's dim is 8 \(file .*vectors.parquet, row 0, column 'em",
        ),
        ({"vectors": np.where(np.arange(320) == 100, np.nan, 1.0).reshape(40, 8)}, "not finite .*row 12, .*value nan"),
        ({"ids": [*range(39), 7]}, "the id is also in row 7 .*row 39, column 'user_id', value 7.*fix: keep one row"),
        (
            {"ids": [f"{user}" for user in range(40)]},
            "feature 'user' was trained on integer ids .*column 'user_id'.*fix:",
        ),
        ({"vector": "embeding"}, "'embeding' is missing; .*did you mean 'embedding'.*set tables.user.init.vector"),
        ({"path": "nowhere.parquet"}, "nowhere.parquet"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_the_first_step(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_all(tmp_path, rows=200)
    init = write_vectors(tmp_path / "vectors.parquet", change.get("ids", [*range(40)]), change.get("vectors"))
    init |= {name: str(tmp_path / value) if name == "path" else value for name, value in change.items() if name in init}
    with pytest.raises((DataError, TrainError), match=message):
        trainer(tmp_path, name="wrong", **with_users(tmp_path, init), **STILL).fit()
    assert not records(tmp_path / "runs" / "wrong", "train")


def test_features_of_a_table_that_map_ids_differently_need_the_name_of_one(tmp_path: Path) -> None:
    write_all(tmp_path, rows=200)
    init = write_vectors(tmp_path / "vectors.parquet", [3, 4])
    how = with_users(tmp_path, init)
    hashed = {"name": "again", "column": "user", "mapping": {"kind": "hash", "seed": 1}}
    how["schema"]["sparse"].append(hashed)
    how["tables"][0]["features"] = ["user", "again"]
    text = r"tables.user.init: features 'user' and 'again' map ids differently .*set tables.user.init.feature"
    with pytest.raises(TrainError, match=text):
        trainer(tmp_path, **how, **STILL).fit()
    started = {}
    for name in ("user", "again"):
        how["tables"][0]["init"] = {**init, "feature": name}
        started[name] = table_of(trainer(tmp_path, name=name, **how, **STILL).fit().folder, "user")
    torch.testing.assert_close(started["user"][rows_of_users([3, 4])], torch.from_numpy(VECTORS[:2]))
    in_both = (started["again"][:, None] == started["user"][rows_of_users([3, 4])]).all(2)
    assert in_both.sum().tolist() == 2 and not torch.equal(started["again"], started["user"])
    how["schema"]["sparse"][-1]["mapping"] = how["schema"]["sparse"][0]["mapping"]
    how["tables"][0]["init"] = init
    same = trainer(tmp_path, name="same", **how, **STILL).fit()
    torch.testing.assert_close(table_of(same.folder, "user"), started["user"])


def test_a_table_starts_from_vectors_or_from_a_checkpoint(tmp_path: Path) -> None:
    write_all(tmp_path, rows=200)
    base = trainer(tmp_path, name="base", **with_users(tmp_path, None), **STILL).fit()
    how = {**with_users(tmp_path, write_vectors(tmp_path / "vectors.parquet", [*range(40)])), **STILL}
    with pytest.raises(TrainError, match=r"table 'user' has initial vectors .* list the table in init_from.fresh"):
        trainer(tmp_path, name="both", init_from=str(base.folder), **how).fit()
    run = trainer(tmp_path, name="both", init_from={"path": str(base.folder), "fresh": ["user"]}, **how).fit()
    torch.testing.assert_close(table_of(run.folder, "user")[rows_of_users(range(40))], torch.from_numpy(VECTORS[:40]))
    torch.testing.assert_close(table_of(run.folder, "item"), table_of(base.folder, "item"))
