"""The MovieLens preparation, run as a user runs it, on small made-up sources and (once) on the published ratings."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).parents[2] / "data" / "movielens"
GENRES = ["unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"]
GENRES += ["Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"]
NUM_RATINGS, NUM_USERS, NUM_ITEMS = 1003, 12, 90


@dataclass(frozen=True)
class Rating:
    user: int
    item: int
    stars: int
    time: int


@functools.cache
def drawn_ratings() -> list[Rating]:
    """Few distinct times, so that users and items have many ties."""
    draw = random.Random(0)
    pairs = draw.sample(
        [(user, item) for user in range(1, NUM_USERS + 1) for item in range(1, NUM_ITEMS + 1)], NUM_RATINGS
    )
    return [Rating(user, item, draw.randint(1, 5), 880_000_000 + draw.randrange(150)) for user, item in pairs]


def genres_of(item: int) -> list[str]:
    return sorted({GENRES[item % 19], GENRES[item % 7]}, key=GENRES.index)


def write_source(folder: Path, ratings: list[Rating]) -> Path:
    folder.mkdir(parents=True)
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    inter += [f"{r.user}\t{r.item}\t{r.stars}\t{r.time}" for r in ratings]
    user = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    user += [f"{u}\t{20 + u}\t{'FM'[u % 2]}\twriter\t00000" for u in range(1, NUM_USERS + 1)]
    item = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    item += [f"{i}\tCafé {i}\t{1900 + i}\t{' '.join(genres_of(i))}" for i in range(1, NUM_ITEMS)]
    item += [f"{NUM_ITEMS}\tunkonwn\tunkonwn\tunknown"]
    for name, lines in (("inter", inter), ("user", user), ("item", item)):
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


Done = subprocess.CompletedProcess[str]


def prepare_as_a_user(*args: str | Path, **environment: str) -> Done:
    command = [sys.executable, str(FOLDER / "prepare.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


@functools.cache
def loaded() -> Callable[[list[str]], int]:
    """The script's `main`, which finds its modules beside it."""
    sys.path.insert(0, str(FOLDER))
    try:
        main: Callable[[list[str]], int] = runpy.run_path(str(FOLDER / "prepare.py"))["main"]
    finally:
        sys.path.remove(str(FOLDER))
    return main


def prepare(*args: str | Path) -> Done:
    """As `prepare_as_a_user`, in this process."""
    words, out, errors = [*map(str, args)], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = loaded()(words)
    return Done(words, status, out.getvalue(), errors.getvalue())


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return ds.dataset(folder, format="parquet").to_table().to_pylist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "files", drawn_ratings())


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("prepared") / "parquet"
    done = prepare_as_a_user("--source", source, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "Harper" in done.stdout and "commercial" in done.stdout
    yield out


@functools.cache
def mean_then(item: int, time: int) -> float:
    """The item's stars from ratings strictly before `time`, and ten of 3.5."""
    stars = [r.stars for r in drawn_ratings() if r.item == item and r.time < time]
    return (sum(stars) + 35) / (len(stars) + 10)


def check_against_brute_force(row: dict[str, Any], ratings: list[Rating]) -> None:
    """Recomputes what was known before a row's rating from ratings that are strictly earlier, one by one."""
    before = [r for r in ratings if r.time < row["timestamp"]]
    mine = sorted((r for r in before if r.user == row["user_id"]), key=lambda r: (r.time, r.item))
    assert row["liked"] == [r.item for r in mine if r.stars >= 4][-20:]
    assert row["disliked"] == [r.item for r in mine if r.stars < 4][-20:]
    assert row["user_count"] == len(mine)
    assert row["item_count"] == sum(r.item == row["item_id"] for r in before)
    assert row["item_mean"] == pytest.approx(mean_then(row["item_id"], row["timestamp"]), abs=1e-5)
    lift = sum(r.stars - mean_then(r.item, r.time) for r in mine) / (len(mine) + 5)
    assert row["user_lift"] == pytest.approx(lift, abs=1e-5)


def test_no_rating_sees_itself_a_tie_or_the_future(prepared: Path) -> None:
    ratings = drawn_ratings()
    known = {(r.user, r.item): r for r in ratings}
    rows = rows_of(prepared / "train") + rows_of(prepared / "eval")
    assert {(row["user_id"], row["item_id"]) for row in rows} == set(known) and len(rows) == NUM_RATINGS
    assert any(not row["liked"] for row in rows) and any(len(row["liked"]) == 20 for row in rows)
    for row in rows:
        rating = known[row["user_id"], row["item_id"]]
        assert (row["timestamp"], row["label"]) == (rating.time, int(rating.stars >= 4))
        check_against_brute_force(row, ratings)


def test_users_and_items_are_described(prepared: Path) -> None:
    words = json.loads((prepared / "vocabulary.json").read_text())
    for row in rows_of(prepared / "eval"):
        user, item = row["user_id"], row["item_id"]
        assert row["age"] == 20 + user and words["gender"][row["gender"]] == "FM"[user % 2]
        assert words["occupation"][row["occupation"]] == "writer"
        known = item < NUM_ITEMS
        assert row["release_year"] == (1900 + item if known else 1995)
        assert [words["genres"][genre] for genre in row["genres"]] == (genres_of(item) if known else ["unknown"])


def test_the_last_fifth_in_time_is_for_evaluation(prepared: Path) -> None:
    train, evaluation = rows_of(prepared / "train"), rows_of(prepared / "eval")
    assert (len(train), len(evaluation)) == (803, 200)
    assert max(row["timestamp"] for row in train) <= min(row["timestamp"] for row in evaluation)
    times = [row["timestamp"] for row in evaluation]
    assert times == sorted(times) and [row["timestamp"] for row in train] != sorted(row["timestamp"] for row in train)


def test_random_split_is_drawn_by_the_seed(source: Path, tmp_path: Path) -> None:
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        done = prepare("--source", source, "--out", tmp_path / name, "--split", "random", "--seed", str(seed))
        assert done.returncode == 0, done.stderr
        drawn[name] = rows_of(tmp_path / name / "eval")
        assert len(drawn[name]) == 200 and len(rows_of(tmp_path / name / "train")) == 803
    assert drawn["a"] == drawn["b"] and drawn["a"] != drawn["c"]
    assert min(row["timestamp"] for row in drawn["a"]) < 880_000_020


def test_several_files_and_row_groups(prepared: Path) -> None:
    for name, num_files in (("train", 8), ("eval", 4)):
        files = sorted((prepared / name).glob("*.parquet"))
        assert len(files) == num_files and len(list((prepared / name).iterdir())) == num_files
        assert all(pq.ParquetFile(file).metadata.num_row_groups >= 2 for file in files)
        assert len({str(pq.read_schema(file)) for file in files}) == 1
    types = {field.name: str(field.type) for field in pq.read_schema(prepared / "train" / "part-00000.parquet")}
    assert types.pop("label") == "int8" and types.pop("user_lift") == types.pop("item_mean") == "float"
    lists = {types.pop(name) for name in ("genres", "liked", "disliked")}
    assert len(lists) == 1 and lists.pop().startswith("list<") and set(types.values()) == {"int64"}


def test_again_does_nothing_until_something_differs(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"

    def made(*args: str | Path) -> bool:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
        done = prepare("--source", source, "--out", out, *args)
        assert done.returncode == 0, done.stderr
        after = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
        assert ("already there" in done.stdout) == (before == after)
        assert [path.name for path in out.glob(".new-*")] == []
        return before != after

    assert made() and not made()
    assert made("--split", "random") and not made("--split", "random")
    assert made("--split", "random", "--seed", "1")
    assert made() and not made()
    (out / "eval" / "part-00001.parquet").unlink()
    assert made() and not made()
    other = write_source(tmp_path / "other", drawn_ratings()[:500])
    assert made("--source", other) and not made("--source", other)


def test_an_unfinished_result_is_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    assert prepare("--source", source, "--out", out).returncode == 0
    # What a run that was killed while it wrote leaves behind.
    (out / "manifest.json").write_text('{"data_set": "movielens-100k", "complete": false}')
    (out / ".new-killed" / "train").mkdir(parents=True)
    done = prepare("--source", source, "--out", out)
    assert done.returncode == 0 and "already there" not in done.stdout
    assert not (out / ".new-killed").exists()


def test_tiny_sources_work(tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    assert prepare("--source", write_source(tmp_path / "s", drawn_ratings()[:6]), "--out", out).returncode == 0
    assert (len(rows_of(out / "train")), len(rows_of(out / "eval"))) == (5, 1)


def refused(*args: str | Path, **environment: str) -> str:
    done = prepare_as_a_user(*args, **environment) if environment else prepare(*args)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr, done
    return done.stderr


def test_missing_sources_are_named(tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    assert str(tmp_path / "nowhere") in refused("--source", tmp_path / "nowhere", "--out", out)
    (tmp_path / "empty").mkdir()
    error = refused("--source", tmp_path / "empty", "--out", out)
    assert "ml-100k.inter" in error
    half = write_source(tmp_path / "half", drawn_ratings()[:10])
    (half / "ml-100k.user").unlink()
    assert "lacks ml-100k.user" in refused("--source", half, "--out", out)
    assert not out.exists()


MALFORMED = {
    "too few fields": ("ml-100k.inter", "1\t2\t3", ["ml-100k.inter", "line 8", "got 3"]),
    "stars": ("ml-100k.inter", "1\t2\t6\t880000000", ["ml-100k.inter line 8", "6.0", "1 to 5"]),
    "not a number": ("ml-100k.inter", "one\t2\t3\t880000000", ["ml-100k.inter", "line 8", "'one'"]),
    "time not finite": ("ml-100k.inter", "1\t2\t3\tinf", ["ml-100k.inter line 8", "inf"]),
    "unknown user": ("ml-100k.inter", "77\t2\t3\t880000000", ["ml-100k.inter", "user 77"]),
    "unknown item": ("ml-100k.inter", "1\t999\t3\t880000000", ["ml-100k.inter", "item 999"]),
    "gender": ("ml-100k.user", "99\t30\tX\twriter\t0", ["ml-100k.user line 14", "gender 'X'"]),
    "occupation": ("ml-100k.user", "99\t30\tF\tpirate\t0", ["ml-100k.user line 14", "occupation 'pirate'"]),
    "genre": ("ml-100k.item", "99\tTitle\t1990\tSlapstick", ["ml-100k.item line 92", "genre 'Slapstick'"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines_are_named(case: str, tmp_path: Path) -> None:
    name, line, words = MALFORMED[case]
    source = write_source(tmp_path / "source", drawn_ratings()[:6])
    with (source / name).open("a") as file:
        file.write(line + "\n")
    error = refused("--source", source, "--out", tmp_path / "parquet")
    assert [word for word in words if word not in error] == []


def test_a_header_without_a_column_is_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", drawn_ratings()[:6])
    text = (source / "ml-100k.inter").read_text().replace("timestamp:float", "when:float")
    (source / "ml-100k.inter").write_text(text)
    error = refused("--source", source, "--out", tmp_path / "parquet")
    assert "ml-100k.inter" in error and "'timestamp:float'" in error


def test_folders_with_other_files_are_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    (out / "train").mkdir(parents=True)
    (out / "train" / "precious.parquet").write_text("mine")
    error = refused("--source", source, "--out", out)
    assert str(out) in error and "--out" in error
    assert (out / "train" / "precious.parquet").read_text() == "mine" and not (out / "manifest.json").exists()
    assert "--out" in refused("--source", source, "--out", out / "train" / "precious.parquet")


def test_an_output_with_other_files_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    assert prepare("--source", source, "--out", out).returncode == 0
    for mine in (out / "train" / "mine.parquet", out / "eval" / "notes" / "a.txt", out / "mine.txt"):
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        assert "already there" in prepare("--source", source, "--out", out).stdout
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
        error = refused("--source", source, "--out", out, "--seed", "1")
        assert str(mine.relative_to(out)) in error and "another folder" in error
        assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
        mine.unlink()
    (out / "eval" / "notes").rmdir()
    assert prepare("--source", source, "--out", out, "--seed", "1").returncode == 0


def test_without_network_it_says_how_to_go_on(tmp_path: Path) -> None:
    # An index on a port where nobody listens; other ways for pip to find the wheel are closed.
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    offline |= {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
    error = refused("--out", tmp_path / "parquet", **offline)
    assert "recbole==1.2.1" in error and "network" in error and "--source DIR" in error


def test_published_ratings(tmp_path: Path) -> None:
    """The real thing: from data/movielens/raw if somebody put the files there, else fetched with pip."""
    raw = FOLDER / "raw"
    source: list[str | Path] = ["--source", raw] if raw.is_dir() else []
    done = prepare("--out", tmp_path / "parquet", *source)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "parquet" / "manifest.json").read_text())
    assert manifest["rows"] == {"train": 80_000, "eval": 20_000}
    columns = ["user_id", "item_id", "genres", "label", "timestamp"]
    tables = [ds.dataset(tmp_path / "parquet" / name).to_table(columns).to_pandas() for name in ("train", "eval")]
    assert max(table.user_id.max() for table in tables) == 943 and max(table.item_id.max() for table in tables) == 1682
    assert sum(table.label.sum() for table in tables) == 55_375
    assert tables[0].timestamp.max() <= tables[1].timestamp.min()
    # A second run without --source takes it for what it is, wherever it came from.
    again = prepare_as_a_user("--out", tmp_path / "parquet", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert again.returncode == 0 and "already there" in again.stdout
