"""Downloads and reads MovieLens-100K. `history.py` computes histories and counts; `prepare.py` splits and writes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

WHEEL = "recbole==1.2.1"
WHEEL_FOLDER = "recbole/dataset_example/ml-100k"
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


T = TypeVar("T")


class SourceError(ValueError):
    """The source cannot be downloaded or read. The message names the file, the line and the fix."""


@dataclass(frozen=True, slots=True)
class User:
    age: int
    gender: int
    occupation: int


@dataclass(frozen=True, slots=True)
class Item:
    """`release_year` is None if unknown; `genres` are ascending indices into GENRES."""

    release_year: int | None
    genres: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens:
    """R ratings ordered by time, user and item, and the rated items and users.

    Args:
        user_R, item_R: int64, published ids, from 1.
        rating_R: int64, 1 to 5 stars.
        time_R: int64, Unix seconds, ascending.
        users, items: by id; contain every id in the ratings.
    """

    user_R: NDArray[np.int64]
    item_R: NDArray[np.int64]
    rating_R: NDArray[np.int64]
    time_R: NDArray[np.int64]
    users: dict[int, User]
    items: dict[int, Item]

    @property
    def ratings_sha256(self) -> str:
        """Fingerprint of the ratings, which identifies the published data set."""
        ratings_4R = np.stack([self.user_R, self.item_R, self.rating_R, self.time_R])
        return hashlib.sha256(ratings_4R.astype("<i8").tobytes()).hexdigest()

    @property
    def sha256(self) -> str:
        """Fingerprint of ratings, users and items."""
        content = repr((self.ratings_sha256, sorted(self.users.items()), sorted(self.items.items())))
        return hashlib.sha256(content.encode()).hexdigest()


def fetch(folder: Path) -> Path:
    """Downloads the wheel that contains the data set, and extracts the three data files into `folder`.

    Raises:
        SourceError: pip could not download it (no network, no pip), or it does not contain the files.
    """
    options = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    limits = ["--quiet", "--retries", "2", "--timeout", "20"]
    with tempfile.TemporaryDirectory(prefix="movielens-") as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *options, *limits, "--dest", scratch, WHEEL], capture_output=True, text=True
        )
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            output = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
            raise SourceError(
                f"pip could not download {WHEEL}, which contains MovieLens-100K (exit {done.returncode}). Check the "
                f"network and pip's index, or use a local copy with --source DIR. Output of pip:\n{output}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in FILES:
                member = f"{WHEEL_FOLDER}/{name}"
                if member not in wheel.namelist():
                    raise SourceError(f"{wheels[0].name} does not contain {member}; use a local copy with --source DIR")
                (folder / name).write_bytes(wheel.read(member))
    return folder


def read(folder: Path) -> MovieLens:
    """Reads a folder with `ml-100k.inter`, `ml-100k.user` and `ml-100k.item`.

    Raises:
        SourceError: no such folder, missing files, or an invalid line.
    """
    if not folder.is_dir():
        raise SourceError(f"source {folder} is not a folder; --source needs the folder of {', '.join(FILES)}")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise SourceError(f"source {folder} lacks {', '.join(missing)}; it must contain {', '.join(FILES)}")
    inter, user, item = (folder / name for name in FILES)
    return _assemble(
        inter,
        list(_parsed(inter, ["user_id", "item_id", "rating", "timestamp"], _rating)),
        dict(_parsed(user, ["user_id", "age", "gender", "occupation"], _user)),
        dict(_parsed(item, ["item_id", "movie_title", "release_year", "class"], _item)),
    )


def _parsed(path: Path, columns: list[str], parser: Callable[[list[str]], T]) -> Iterator[T]:
    """Parses the given columns of every line. The first line names the columns as `name:type`."""
    try:
        header_line, *lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text ({error}); download the file again") from error
    header = [name.split(":")[0] for name in header_line.rstrip("\r").split("\t")]
    missing = [name for name in columns if name not in header]
    if missing:
        raise SourceError(f"{path} line 1: no column {missing[0]!r} in the header {header}; it must name {columns}")
    positions = [header.index(name) for name in columns]
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(header):
            raise SourceError(
                f"{path} line {number}: {len(fields)} fields, expected {len(header)} separated by tabs: {line[:80]!r}; "
                "download the file again"
            )
        try:
            yield parser([fields[position] for position in positions])
        except ValueError as error:
            raise SourceError(f"{path} line {number}: {error}, in {fields}; download the file again") from error


def _rating(fields: list[str]) -> tuple[int, int, int, int]:
    user, item, rating, time = fields
    if float(rating) not in (1, 2, 3, 4, 5):
        raise ValueError(f"rating {rating!r} is not an integer from 1 to 5")
    if not float(time).is_integer():
        raise ValueError(f"timestamp {time!r} is not an integer number of seconds")
    return _id(user), _id(item), int(float(rating)), int(float(time))


def _user(fields: list[str]) -> tuple[int, User]:
    user, age, gender, occupation = fields
    return _id(user), User(int(age), _index(GENDERS, gender, "gender"), _index(OCCUPATIONS, occupation, "occupation"))


def _item(fields: list[str]) -> tuple[int, Item]:
    item, title, year, genres = fields
    # One title contains two years in parentheses; its year column is a stray "V".
    years_in_title = re.findall(r"\((\d{4})\)", title)
    released = int(year) if year.isdigit() else int(years_in_title[-1]) if years_in_title else None
    return _id(item), Item(released, tuple(sorted(_index(GENRES, genre, "genre") for genre in genres.split())))


def _id(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"id {text!r} is not a positive integer")
    return number


def _index(vocabulary: list[str], word: str, kind: str) -> int:
    if word not in vocabulary:
        raise ValueError(f"{kind} {word!r} is not one of {vocabulary}")
    return vocabulary.index(word)


def _assemble(
    path: Path, ratings: list[tuple[int, int, int, int]], users: dict[int, User], items: dict[int, Item]
) -> MovieLens:
    if not ratings:
        raise SourceError(f"{path} contains no ratings; download the file again")
    user_R, item_R, rating_R, time_R = np.array(ratings, dtype=np.int64).T
    for kind, ids_R, described in (("user", user_R, users), ("item", item_R, items)):
        unknown = np.flatnonzero(~np.isin(ids_R, list(described)))
        if unknown.size:
            raise SourceError(f"{path}: {kind} {ids_R[unknown[0]]} has ratings but no line in the {kind} file")
    order = np.lexsort((item_R, user_R, time_R))
    return MovieLens(
        user_R=user_R[order],
        item_R=item_R[order],
        rating_R=rating_R[order],
        time_R=time_R[order],
        users=users,
        items=items,
    )
