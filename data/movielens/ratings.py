"""Downloads and reads MovieLens-100K: `ml-100k.inter`, `.user` and `.item`, as the wheel of RecBole has them."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from numpy.typing import NDArray

WHEEL = "recbole==1.2.1"
FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
# `MovieLens.ratings_sha256` of the published 100,000 ratings.
PUBLISHED_SHA256 = "121db98e74b878aea0b7f6fb4bf2b5ebc97f4d55d964a544282613c7b9151f1b"

# GroupLens' order of genres, and occupations sorted. Constants, so that ids do not depend on the source, and a config
# can contain the sizes of tables.
# fmt: off
GENRES = [
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
]
OCCUPATIONS = [
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare",
    "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman",
    "scientist", "student", "technician", "writer",
]
# fmt: on
GENDERS = ["F", "M"]


class User(NamedTuple):
    age: int
    gender: int
    occupation: int


class Item(NamedTuple):
    """`release_year` is None if unknown; `genres` are ascending indices into GENRES."""

    release_year: int | None
    genres: tuple[int, ...]


class MovieLens(NamedTuple):
    """R ratings ordered by time, user and item, and the rated items and users.

    `ratings_4R` has published ids of users and of items from 1, stars from 1 to 5, and Unix seconds, all int64.
    """

    ratings_4R: NDArray[np.int64]
    users: dict[int, User]
    items: dict[int, Item]

    @property
    def ratings_sha256(self) -> str:
        """Fingerprint of the ratings, which identifies the published data set."""
        return hashlib.sha256(self.ratings_4R.astype("<i8").tobytes()).hexdigest()

    @property
    def sha256(self) -> str:
        """Fingerprint of ratings, users and items."""
        content = repr((self.ratings_sha256, sorted(self.users.items()), sorted(self.items.items())))
        return hashlib.sha256(content.encode()).hexdigest()


def fetch(folder: Path) -> None:
    """Downloads the wheel that contains the data set, and extracts the three data files into `folder`.

    Raises:
        ValueError: pip could not download it (no network, no pip), or it does not contain the files.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    options += ["--retries", "2", "--timeout", "20"]
    with tempfile.TemporaryDirectory(prefix="movielens-") as scratch:
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = next(Path(scratch).glob("*.whl"), None)
        if done.returncode or wheel is None:
            output = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
            raise ValueError(
                f"pip could not download {WHEEL}, which contains MovieLens-100K (exit {done.returncode}). Check the "
                f"network and pip's index, or use a local copy with --source DIR. Output of pip:\n{output}"
            )
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                (folder / name).write_bytes(archive.read(f"recbole/dataset_example/ml-100k/{name}"))


def read(folder: Path) -> MovieLens:
    """Reads a folder with the three files.

    Raises:
        ValueError: no such folder, missing files, or an invalid line.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"source {folder} lacks {', '.join(missing)}; --source needs the folder of {', '.join(FILES)}")
    inter, user, item = (folder / name for name in FILES)
    ratings_4R = _ratings(inter)
    data = MovieLens(ratings_4R[:, np.lexsort(ratings_4R[[1, 0, 3]])], _users(user), _items(item))
    for kind, ids_R, described in (("user", ratings_4R[0], data.users), ("item", ratings_4R[1], data.items)):
        unknown = np.flatnonzero(~np.isin(ids_R, list(described)))
        if unknown.size:
            raise ValueError(f"{inter}: {kind} {ids_R[unknown[0]]} has ratings but no line in the {kind} file")
    return data


def _ratings(path: Path) -> NDArray[np.int64]:
    columns = {"user_id:token": pa.int64(), "item_id:token": pa.int64()}
    table = _table(path, columns | {"rating:float": pa.float64(), "timestamp:float": pa.float64()})
    if not len(table):
        raise ValueError(f"{path} contains no ratings; download the file again")
    user_R, item_R, stars_R, time_R = (column.to_numpy() for column in table.columns)
    _check(path, "id", user_R, user_R >= 1, "is not a positive integer")
    _check(path, "id", item_R, item_R >= 1, "is not a positive integer")
    _check(path, "rating", stars_R, np.isin(stars_R, range(1, 6)), "is not an integer from 1 to 5")
    with np.errstate(invalid="ignore"):
        _check(path, "timestamp", time_R, time_R % 1 == 0, "is not an integer number of seconds")
    return np.stack([user_R, item_R, stars_R.astype(np.int64), time_R.astype(np.int64)])


def _users(path: Path) -> dict[int, User]:
    columns = {"user_id:token": pa.int64(), "age:token": pa.int64()}
    table = _table(path, columns | {"gender:token": pa.string(), "occupation:token": pa.string()})
    ids, ages, genders, occupations = table.columns
    gender_U, occupation_U = (
        _indices(path, "gender", GENDERS, genders),
        _indices(path, "occupation", OCCUPATIONS, occupations),
    )
    return dict(zip(ids.to_pylist(), map(User, ages.to_pylist(), gender_U, occupation_U), strict=True))


def _items(path: Path) -> dict[int, Item]:
    columns = {"item_id:token": pa.int64(), "movie_title:token_seq": pa.string()}
    table = _table(path, columns | {"release_year:token": pa.string(), "class:token_seq": pa.string()})
    items = {}
    for line, (item, title, year, names) in enumerate(
        zip(*(column.to_pylist() for column in table.columns), strict=True), 2
    ):
        # One title contains two years in parentheses; its year column is a stray "V".
        years = [year] if re.fullmatch("[0-9]+", year) else re.findall(r"\(([0-9]{4})\)", title)
        genres = _indices(path, "genre", GENRES, pa.chunked_array([names.split()], pa.string()), line)
        items[item] = Item(int(years[-1]) if years else None, tuple(sorted(genres)))
    return items


def _table(path: Path, columns: dict[str, pa.DataType]) -> pa.Table:
    """The columns of a file of tab-separated cells, in this order. The first line names them as `name:type`."""
    try:
        return pacsv.read_csv(
            path,
            pacsv.ReadOptions(use_threads=False),  # with threads, errors have no line
            pacsv.ParseOptions(delimiter="\t", quote_char=False),
            pacsv.ConvertOptions(column_types=columns, include_columns=list(columns), null_values=[]),
        )
    except (pa.ArrowException, KeyError) as error:
        problem = re.sub(r"Row #(\d+)", r"line \1", str(error))
        raise ValueError(f"{path}: {problem}; download the file again") from error


def _indices(path: Path, kind: str, names: list[str], words: pa.ChunkedArray, line: int | None = None) -> list[int]:
    indices = pc.index_in(words, pa.array(names))
    values = np.array(words.to_pylist(), object)
    _check(path, kind, values, indices.is_valid().to_numpy(), f"is not one of {names}", line)
    return indices.to_pylist()


def _check(path: Path, kind: str, values: np.ndarray, good: np.ndarray, problem: str, line: int | None = None) -> None:
    if not good.all():
        row = int(good.argmin())
        value = values[row].item() if isinstance(values[row], np.generic) else values[row]
        raise ValueError(f"{path} line {line or row + 2}: {kind} {value!r} {problem}; download the file again")
