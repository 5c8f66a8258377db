"""The benchmark of the data path runs and prints what it promises; how fast is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.synthetic.clicks import SyntheticSpec, write_files
from jobs.bench import vocabulary
from jobs.bench.data_path import measure, peak_rss_bytes, show

pytestmark = pytest.mark.long


def test_the_benchmark_measures_every_contender(tmp_path: Path, running_ray: None) -> None:
    list(write_files(SyntheticSpec(rows=9_000, files=2), tmp_path))
    found = json.loads(json.dumps(measure(tmp_path, 9_000, 1) | {"peak_rss_bytes": peak_rss_bytes(tmp_path, 9_000)}))
    assert {"rows_per_s", "ratio_to_pyarrow", "ratio_to_ray_stock", "first_batch_s", "peak_rss_bytes"} < found.keys()
    assert {"big_row_groups_ratio", "shuffle_8_ratio", "ordered_ratio"} < found.keys()
    assert all(values["rows_per_s"] > 0 for values in found["details"].values())
    assert {"read and decode Parquet", "consumer", "read tasks"} < found["ns_per_row"].keys()
    assert "Ray's reader" in show(found, 9_000)


def test_the_benchmark_of_vocabularies_measures_both_kinds(tmp_path: Path) -> None:
    found = json.loads(json.dumps(vocabulary.measure(tmp_path, 70_000, 80_000, 2)))
    for name in ("integers", "strings"):
        assert found[name]["bytes"] < 20 * found[name]["ids"] and found[name]["known_per_s"] > 0
    assert found["counted_rows"] == 70_000 and "80,000 strings" in vocabulary.show(found)
