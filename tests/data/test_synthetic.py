"""Generated data follows its spec, is the same every time, and can be learnt from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.synthetic import plays
from data.synthetic.clicks import SyntheticSpec, best_auc, make_table, write_file, write_files
from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema

SPEC = SyntheticSpec(rows=5000, files=3, row_group_rows=700, single=4, multi=2, dense=3, largest=500)


def test_files_follow_the_spec_and_read_back(tmp_path: Path) -> None:
    paths = list(write_files(SPEC, tmp_path / "a"))
    assert [p.name for p in paths] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [p.name for p in paths]
    again = write_file(SPEC, tmp_path / "b", 1)
    assert pq.read_table(again).equals(pq.read_table(paths[1]))
    schema = Schema.model_validate(SPEC.schema_dict())
    manifest = Manifest.read(str(tmp_path / "a"), schema)
    assert manifest.rows == 5000 and max(manifest.files.group_rows) == 700
    with BatchStream(
        manifest,
        schema,
        SPEC.ids,
        batch_rows=5000,
        rank=0,
        world_size=1,
        cursor=Cursor.start(0),
        seed=0,
        options=ReadOptions(reader="local"),
    ) as stream:
        batch, _ = next(stream)
    assert batch.dense.shape == (5000, 3) and len(batch.sparse.keys()) == 6


def test_the_label_depends_on_the_ids() -> None:
    def spread(signal: float) -> float:
        """How much the click rate differs between the ids of a small feature."""
        spec = SyntheticSpec(single=1, multi=0, dense=0, smallest=4, largest=4, signal=signal)
        table = make_table(spec, 20_000, np.random.default_rng(0))
        ids, label = table["id_0"].to_numpy(), table["label"].to_numpy()
        return float(np.std([label[ids == i].mean() for i in range(4)]))

    assert spread(1.0) > 0.05 > 0.02 > spread(0.0)


def test_ids_are_many_at_the_front_and_few_at_the_end() -> None:
    table = make_table(SPEC, 20_000, np.random.default_rng(1))
    largest = max(SPEC.ids, key=lambda name: SPEC.ids[name])
    values = table[largest].combine_chunks()
    ids = values.flatten().to_numpy() if largest.startswith("ids") else values.to_numpy()
    counts = np.bincount(ids, minlength=500)
    assert counts[0] > 5 * counts[100:200].mean() and ids.max() < 500


def test_the_best_auc_is_that_of_the_planted_signal(tmp_path: Path) -> None:
    spec = SyntheticSpec(rows=40_000, files=2, single=2, multi=0, dense=1, smallest=50, largest=50)
    best = best_auc(spec, 1)
    assert best is not None and 0.7 < best < 0.9 and best_auc(spec, 1) == best
    label = pq.read_table(write_file(spec, tmp_path, 1))["label"].to_numpy()
    noise = best_auc(spec.model_copy(update={"signal": 1e-9}), 1)
    assert noise is not None and abs(noise - 0.5) < 0.02
    assert best_auc(spec.model_copy(update={"rows": 2}), 1) is None and 0 < label.mean() < 1


def test_a_seed_means_the_same_rows_as_ever(tmp_path: Path) -> None:
    """Benchmarks' figures are of these rows."""
    spec = SyntheticSpec(rows=2000, files=2, single=2, multi=2, dense=2, smallest=5, largest=300, seed=3)
    assert spec.ids == {"id_0": 5, "id_1": 300, "ids_0": 20, "ids_1": 77}
    rows = pq.read_table(write_file(spec, tmp_path, 1)).to_pydict()
    sums = {name: sum(np.concatenate(v) if name.startswith("ids") else v) for name, v in rows.items()}
    assert sums == pytest.approx(
        {
            "label": 314, "dense_0": 4413.45, "dense_1": 4290.0, "id_0": 1350, "id_1": 51710,
            "ids_0": 17874, "ids_1": 58825,
        },
        rel=1e-5,
    )  # fmt: skip
    assert best_auc(spec, 1) == pytest.approx(0.7521, abs=1e-4)


def test_row_groups_have_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    """Also where they are larger than what is drawn at a time, or cut across it."""
    for size, wanted in ((100_000, [100_000, 50_000]), (40_000, [40_000] * 3 + [30_000])):
        spec = SyntheticSpec(rows=150_000, files=1, row_group_rows=size, single=1, multi=0, dense=0)
        (path,) = write_files(spec, tmp_path / str(size))
        footer = pq.ParquetFile(path).metadata
        assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == wanted


def test_plays_have_the_shape_of_the_reference_workload(tmp_path: Path) -> None:
    lengths = plays.PlaysSpec(users=200_000).lengths
    assert np.median(lengths) == pytest.approx(2695, rel=0.02) and lengths.mean() == pytest.approx(4763, rel=0.02)
    assert lengths.max() == 27_738
    options = ["--users", "60", "--median", "300", "--longest", "3000", "--items", "2000", "--files", "3"]
    assert plays.main([*options, "--out", str(tmp_path)]) == 0
    table = pq.read_table(tmp_path)
    times, like = table["at"].cast("int64").to_numpy() // 1000, table["like"].to_numpy()
    assert (np.diff(times) >= 0).all() and times[0] >= plays.START_S and times[-1] < plays.START_S + 300 * 86_400
    assert like.mean() == pytest.approx(0.019, abs=0.003)
    assert (table["action"].cast("string").to_numpy() == "like").mean() == like.mean()
    popular = np.bincount(table["item"].to_numpy())
    assert popular[:32].mean() > 10 * popular[1000:].mean()
    spec = plays.PlaysSpec(users=60, median=300, longest=3000, items=2000, files=3)
    assert plays.make_plays(spec, 2)[0].equals(pq.read_table(tmp_path / "plays-00002.parquet")), "one file alone"
    assert plays.best_auc(spec, 2) > 0.78
