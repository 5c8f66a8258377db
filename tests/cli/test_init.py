"""From files that nobody described to a served model, by nothing but the commands that are printed."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec.cli import run
from rayrec.serve import ModelSpec, Service
from rayrec.serve.example import example_row, request

ROOT = Path(__file__).resolve().parents[2]


def census(path: Path, rows: int = 1500) -> Path:
    """As a census is passed on: no names, a space after each comma, heavy tails, and the label a text."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(rows):
        age, gain = rng.integers(0, 91), int(rng.random() < 0.1) * rng.integers(100, 99_999)
        school = rng.choice(["Children", "High school graduate", "Masters degree(MA MS MEng MEd MSW MBA)", "?"])
        rich = rng.random() < 1 / (1 + np.exp(3 - age / 40 - (gain > 0) * 3 - (school[0] == "M")))
        cells = [age, school, gain, f"{rng.lognormal(7, 1):.2f}", rng.choice(["Male", "Female"]), rng.integers(94, 96)]
        lines.append(", ".join(map(str, [*cells, "50000+." if rich else "- 50000."])) + "\n")
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def ratings(path: Path, rows: int = 3000) -> Path:
    """Users who rate movies in half stars, at a time."""
    rng = np.random.default_rng(0)
    users, movies = rng.integers(1, 80, rows), rng.integers(1, 9000, 60)[rng.integers(0, 60, rows)]
    stars = np.clip(np.round(2 * (3.5 + np.sin(movies) + rng.normal(0, 0.5, rows))) / 2, 0.5, 5)
    times = rng.integers(964_982_703, 1_537_799_250, rows)
    lines = [f"{u},{m},{s},{t}\n" for u, m, s, t in zip(users, movies, stars, times, strict=True)]
    path.write_bytes(gzip.compress(("userId,movieId,rating,timestamp\n" + "".join(lines)).encode()))
    return path


def histories(path: Path, rows: int = 1500) -> Path:
    """Users with the items that they saw before, and when; items are known by name."""
    rng = np.random.default_rng(0)
    items, lengths = rng.integers(0, 40, rows), rng.integers(0, 6, rows)
    seen = [rng.integers(0, 40, length).tolist() for length in lengths]
    start = 1_700_000_000
    table = {
        "user": pa.array(rng.integers(0, 50, rows)),
        "item": pa.array([f"item {item}" for item in items]),
        "history": pa.array([[f"item {item}" for item in ids] for ids in seen], pa.list_(pa.string())),
        "history_times": pa.array([[datetime(2023, 11, 14, hour) for hour in range(len(ids))] for ids in seen]),
        "label": pa.array((rng.random(rows) < 0.2 + 0.6 * (items % 2)).astype(np.int64)),
        "time": pa.array(start + rng.integers(0, 10**6, rows)),
    }
    pq.write_table(pa.table(table), path)
    return path


def short_video(path: Path, rows: int = 3000) -> Path:
    """A log of what users were shown: times in milliseconds, tags in a cell, and what they did after the click."""
    rng = np.random.default_rng(0)
    users, videos = rng.integers(0, 80, rows), rng.integers(10_000, 90_000, 60)[rng.integers(0, 60, rows)]
    authors, tags = videos % 17, [",".join(map(str, sorted({video % 7, video % 11}))) for video in videos]
    times = np.sort(1_649_606_400_000 + rng.integers(0, 9 * 86_400_000, rows))
    clicks = rng.random(rows) < 1 / (1 + np.exp(-3 * np.sin(videos) - np.sin(users)))
    likes, longer = clicks & (rng.random(rows) < 0.1), clicks & (rng.random(rows) < 0.6)
    played, durations = clicks * rng.integers(1000, 60_000, rows), rng.integers(5000, 60_000, rows)
    columns = [users, videos, authors, [f'"{tag}"' for tag in tags], times, durations, clicks, likes, longer, played]
    head = "user_id,video_id,author_id,tag,time_ms,duration_ms,is_click,is_like,long_view,play_time_ms\n"
    numbers = ([cell if isinstance(cell, str) else int(cell) for cell in line] for line in zip(*columns, strict=True))
    path.write_bytes(gzip.compress((head + "".join(",".join(map(str, line)) + "\n" for line in numbers)).encode()))
    return path


DATA = {
    "census": (census, "c6=50000+."),
    "short_video": (short_video, "is_click"),
    "histories": (histories, "label"),
}


def printed(capsys: pytest.CaptureFixture[str], args: list[str]) -> tuple[str, list[str]]:
    """What a command prints, and the words of the next one."""
    assert run(args) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    command = text.strip().splitlines()[-1]
    assert command.startswith("next: rayrec "), text
    return text, shlex.split(command)[2:]


@pytest.mark.parametrize("kind", DATA)
def test_five_commands_that_are_printed_lead_to_a_model_that_scores(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write, label = DATA[kind]
    file = write(tmp_path / f"{kind}{'.parquet' if kind == 'histories' else '.csv.gz'}")
    text, command = printed(capsys, ["init", file.name, "--label", label])
    assert ("no header line: columns are named c0 to c6" in text) is (kind == "census")
    assert command == ["train", f"{kind}.yaml"]
    if kind == "short_video":
        kinds = {
            feature["name"]: feature["kind"]
            for feature in yaml.safe_load(Path(command[1]).read_text())["schema"]["sparse"]
        }
        assert kinds["tag"] == "id_list" and not {"is_like", "long_view", "play_time_ms"} & set(kinds)
    text, command = printed(capsys, command)
    assert f"look: rayrec evaluate runs/{kind} --checkpoint best" in text
    evaluated, again = printed(capsys, ["evaluate", f"runs/{kind}", "--checkpoint", "best"])
    assert again == command == ["export", f"runs/{kind}", f"exports/{kind}", "--checkpoint", "best"]
    found = re.search(r"AUC (0\.\d+)", evaluated)
    assert found is not None and float(found[1]) > 0.65
    text, command = printed(capsys, command)
    assert command == ["serve", f"exports/{kind}"]
    service = Service([ModelSpec.parse(command[1])])
    words = shlex.split(request(Path(command[1]), "http://127.0.0.1:8000"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/score"]
    (scores,) = service.score(words[-1].encode(), "application/json").scores.values()
    assert 0 < float(scores[0]) < 1
    schema = service.schema()
    assert set(schema["columns"]) == set(json.loads(words[-1])["rows"][0])
    assert [value["name"] for sequence in schema["sequences"] for value in sequence["values"]] == (
        ["history_times"] if kind == "histories" else []
    )
    service.close()


def test_the_config_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    census(tmp_path / "census.csv.gz")
    assert run(["init", "census.csv.gz", "--label", "c6", "--name", "rich"]) == 0
    raw = yaml.safe_load((tmp_path / "rich.yaml").read_text())
    assert raw["name"] == "rich" and raw["schema"]["label"] == {
        "column": "c6", "positive": "50000+.", "negative": "- 50000.",
    }  # fmt: skip
    assert [feature["name"] for feature in raw["schema"]["dense"]] == ["c0", "c2", "c3"]
    sparse = {feature["name"]: feature.get("mapping", {}).get("kind") for feature in raw["schema"]["sparse"]}
    buckets = [f"{name}_bucket" for name in ("c0", "c2", "c3")]
    assert sparse == dict.fromkeys(("c1", "c4", "c5"), "vocabulary") | dict.fromkeys(buckets)
    assert [(one["name"], one["kind"]) for one in raw["schema"]["derived"]] == [(name, "buckets") for name in buckets]
    rows = {table["name"]: table["rows"] for table in raw["tables"]}
    assert rows == {"c1": 5, "c4": 3, "c5": 3} | dict.fromkeys(buckets, 64)
    assert not (tmp_path / "rich-data" / "rows").exists()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["nowhere.csv"], "the path does not exist"),
        (["empty"], "the folder is empty"),
        (["other"], "the folder holds no file that can be read (*.parquet, "),
        (["empty.csv"], "the file has no rows"),
        (["one.csv"], "no column looks like a feature"),
        (["names.csv"], "the file has no rows"),
        (["three.csv"], "no column looks like a label"),
        (["three.csv", "--label", "y"], "3 values, not two: 'a', 'b', 'c'"),
        (["three.csv", "--label", "Y=a"], "did you mean 'y'?"),
        (["three.csv", "--name", "a b"], "try --name a-b"),
        (["three.csv", "--name", "taken"], "taken.yaml already exists"),
        (["three.csv", "--name", "held"], "held-data already exists"),
    ],
)
def test_what_cannot_be_begun_is_one_message_and_leaves_nothing(
    args: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other", "held-data"):
        (tmp_path / folder).mkdir()
    files = {"empty.csv": "", "one.csv": "a\n1\n0\n", "names.csv": "a,b\n", "three.csv": "c,y\nred,a\nblue,b\nred,c\n"}
    for name, text in {**files, "taken.yaml": "", "other/readme.txt": "x"}.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert run(["init", *args]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert part in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "taken.yaml").read_text() == ""


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        ({"sparse": [{"name": "a", "mapping": {"kind": "hash"}}]}, {"a": 0}),
        ({"sparse": [{"name": "a", "mapping": {"kind": "hash"}, "default": "x"}]}, {"a": "x"}),
        ({"sparse": [{"name": "a", "kind": "id_list"}]}, {"a": [0]}),
        ({"sparse": [{"name": "a", "kind": "weighted_id_list"}]}, {"a": [{"id": 0, "weight": 1.0}]}),
        ({"sparse": [{"name": "a", "kind": "id", "id_type": "text"}]}, {"a": "0"}),
        (
            {"sparse": [{"name": "a", "kind": "weighted_id_list", "weight_column": "w"}]},
            {"a": [0], "w": [1.0]},
        ),
        ({"dense": [{"name": "d", "transforms": [{"kind": "log1p"}]}]}, {"d": 0.0}),
        ({"dense": [{"name": "d", "width": 2}]}, {"d": [0.0, 0.0]}),
    ],
)
def test_an_example_is_made_of_what_the_mapping_takes(
    schema: dict[str, object], row: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "mapping.json").write_text(json.dumps({"schema": schema}))
    assert example_row(tmp_path) == row
    (tmp_path / "a token").write_text("x")
    text = request(tmp_path, "http://h", tmp_path / "a token")
    assert f"""-H "Authorization: Bearer $(cat '{tmp_path / "a token"}')" """ in text


def test_tables_keep_names_on_one_line_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    long = "a_column_whose_name_is_longer_than_most_terminals_would_like_it_to_be"
    (tmp_path / "x.csv").write_text(f"{long},click\n" + "a,0\nb,1\n" * 20)
    assert run(["init", "x.csv"]) == 0
    text = capsys.readouterr().out
    assert f"│ {long} │ string │ id " in text
    assert "label: click (by its name); 50.0% of 40 rows have 1\n" in text


FILES = Path(os.environ.get("RAYREC_SHARED_DATA", ROOT.parent / "shared" / "data"))
REAL = {"census_income_test.csv.gz": "c41=50000+.", "ml_latest_small_ratings.csv.gz": "rating>=3.5"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_commands_in_a_shell_end_with_a_score(tmp_path: Path) -> None:
    """As a user types them, on a Ray of their own, from a public file as it is, or else from one made here."""
    name = "ml_latest_small_ratings.csv.gz"
    file = FILES / name if (FILES / name).exists() else ratings(tmp_path / "ratings.csv.gz")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment.pop("RAY_ADDRESS", None)
    words = ["jobs/bench/start.py", "--json", "--first", str(file), REAL[name]]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["command"].split()[1] for step in steps[:5]] == ["init", "train", "evaluate", "export", "serve"]
    (score,) = next(iter(json.loads(steps[5]["said"])["scores"].values()))
    assert len(steps) == 6 and 0 < score < 1
    assert all(step["seconds"] > 0 for step in steps)
