"""MovieLens-100K as it is published: where it is fetched from, and its two file layouts read into arrays.

What is computed from the ratings (histories, counts) is in `history.py`; splitting and writing are in `prepare.py`.
"""

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
RECBOLE_FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
GROUPLENS_FILES = ("u.data", "u.user", "u.item")
# What `MovieLens.ratings_sha256` is for the published 100,000 ratings, in either layout.
PUBLISHED_SHA256 = "121db98e74b878aea0b7f6fb4bf2b5ebc97f4d55d964a544282613c7b9151f1b"

# The order GroupLens gives them in u.genre (also the order of the flags in u.item), and u.occupation sorted. Fixed
# rather than collected, so that an id means the same whatever the source and the tables' sizes can stand in a config.
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
    """The source cannot be had or read; the message names the file, the line and what to do."""


@dataclass(frozen=True, slots=True)
class User:
    age: int
    gender: int
    occupation: int


@dataclass(frozen=True, slots=True)
class Item:
    """`release_year` is None where it is not known; `genres` are positions in GENRES, ascending."""

    release_year: int | None
    genres: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens:
    """R ratings in order of time (then user, then item), and who and what they are about.

    Args:
        user_R, item_R: int64, ids as published (from 1).
        rating_R: int64, 1 to 5 stars.
        time_R: int64, unix seconds, ascending.
        users, items: by id; hold every id that occurs in the ratings.
    """

    user_R: NDArray[np.int64]
    item_R: NDArray[np.int64]
    rating_R: NDArray[np.int64]
    time_R: NDArray[np.int64]
    users: dict[int, User]
    items: dict[int, Item]

    @property
    def ratings_sha256(self) -> str:
        """Fingerprint of the ratings alone, by which the published data set is known whatever its layout."""
        ratings_4R = np.stack([self.user_R, self.item_R, self.rating_R, self.time_R])
        return hashlib.sha256(ratings_4R.astype("<i8").tobytes()).hexdigest()

    @property
    def sha256(self) -> str:
        """Fingerprint of ratings, users and items."""
        about = repr((self.ratings_sha256, sorted(self.users.items()), sorted(self.items.items())))
        return hashlib.sha256(about.encode()).hexdigest()


def fetch(folder: Path) -> Path:
    """Downloads the wheel that bundles the data set and unpacks only the three data files into `folder`.

    Raises:
        SourceError: pip could not fetch it (no network, no pip), or it does not hold the files.
    """
    asked = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    bounded = ["--quiet", "--retries", "2", "--timeout", "20"]
    with tempfile.TemporaryDirectory(prefix="movielens-") as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *asked, *bounded, "--dest", scratch, WHEEL], capture_output=True, text=True
        )
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
            raise SourceError(
                f"pip could not download {WHEEL}, which bundles MovieLens-100K (exit {done.returncode}). Check the "
                f"network and pip's index, or give a local copy with --source DIR. pip said:\n{said}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in RECBOLE_FILES:
                member = f"{WHEEL_FOLDER}/{name}"
                if member not in wheel.namelist():
                    raise SourceError(f"{wheels[0].name} does not hold {member}; give a local copy with --source DIR")
                (folder / name).write_bytes(wheel.read(member))
    return folder


def read(folder: Path) -> MovieLens:
    """Reads a folder in the layout of the wheel (ml-100k.inter, .user, .item) or of GroupLens (u.data, u.user, u.item).

    Raises:
        SourceError: no such folder, files missing, or a line that cannot be understood.
    """
    if not folder.is_dir():
        raise SourceError(f"source {folder} is not a folder; --source takes the folder of the MovieLens-100K files")
    for names, reader in ((RECBOLE_FILES, _read_recbole), (GROUPLENS_FILES, _read_grouplens)):
        missing = [name for name in names if not (folder / name).is_file()]
        if not missing:
            return reader(folder)
        if len(missing) < len(names):
            raise SourceError(f"source {folder} lacks {', '.join(missing)}; it must hold {', '.join(names)}")
    either = " or ".join(", ".join(names) for names in (RECBOLE_FILES, GROUPLENS_FILES))
    raise SourceError(f"source {folder} holds no MovieLens-100K: it must have {either}")


def _read_recbole(folder: Path) -> MovieLens:
    inter, user, item = (folder / name for name in RECBOLE_FILES)
    return _assemble(
        inter,
        [_parse(line, _rating) for line in _named(inter, ["user_id", "item_id", "rating", "timestamp"])],
        dict(_parse(line, _user) for line in _named(user, ["user_id", "age", "gender", "occupation"])),
        dict(_parse(line, _recbole_item) for line in _named(item, ["item_id", "movie_title", "release_year", "class"])),
    )


def _read_grouplens(folder: Path) -> MovieLens:
    data, user, item = (folder / name for name in GROUPLENS_FILES)
    return _assemble(
        data,
        [_parse(line, _rating) for line in _lines(data, "\t", 4)],
        dict(_parse(line, _user) for line in _lines(user, "|", 5)),
        dict(_parse(line, _grouplens_item) for line in _lines(item, "|", 5 + len(GENRES), encoding="latin-1")),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a source file, kept with its place for messages."""

    path: Path
    number: int
    fields: list[str]


def _lines(path: Path, separator: str, num_fields: int, encoding: str = "utf-8") -> Iterator[_Line]:
    try:
        text = path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not {encoding} text ({error}); fetch the file again") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split(separator)
        if len(fields) != num_fields:
            raise SourceError(
                f"{path} line {number}: {len(fields)} fields where {num_fields} separated by {separator!r} were "
                f"expected: {line[:80]!r}; fetch the file again"
            )
        yield _Line(path, number, fields)


def _named(path: Path, columns: list[str]) -> Iterator[_Line]:
    """Lines of a file whose first line names its columns as `name:type`, cut to `columns` in that order."""
    with path.open(encoding="utf-8", errors="replace") as file:
        header = [name.split(":")[0] for name in file.readline().rstrip("\r\n").split("\t")]
    missing = [name for name in columns if name not in header]
    if missing:
        raise SourceError(f"{path} line 1: no column {missing[0]!r} in the header {header}; it must name {columns}")
    places = [header.index(name) for name in columns]
    lines = _lines(path, "\t", len(header))
    next(lines)
    for line in lines:
        yield _Line(path, line.number, [line.fields[place] for place in places])


def _parse(line: _Line, parser: Callable[[list[str]], T]) -> T:
    try:
        return parser(line.fields)
    except ValueError as error:
        raise SourceError(f"{line.path} line {line.number}: {error}, in {line.fields}; fetch the file again") from error


def _rating(fields: list[str]) -> tuple[int, int, int, int]:
    user, item, rating, time = fields
    if float(rating) not in (1, 2, 3, 4, 5):
        raise ValueError(f"rating {rating!r} is not a whole number from 1 to 5")
    if not float(time).is_integer():
        raise ValueError(f"timestamp {time!r} is not a whole number of seconds")
    return _id(user), _id(item), int(float(rating)), int(float(time))


def _user(fields: list[str]) -> tuple[int, User]:
    user, age, gender, occupation = fields[:4]
    return _id(user), User(int(age), _place(GENDERS, gender, "gender"), _place(OCCUPATIONS, occupation, "occupation"))


def _recbole_item(fields: list[str]) -> tuple[int, Item]:
    item, title, year, genres = fields
    # One title holds two years in brackets; there the column has a stray "V" and the year stayed in the title.
    released = int(year) if year.isdigit() else _year_in(title)
    return _id(item), Item(released, tuple(sorted(_place(GENRES, genre, "genre") for genre in genres.split())))


def _grouplens_item(fields: list[str]) -> tuple[int, Item]:
    item, title, date = fields[:3]
    flags = fields[5:]
    if not set(flags) <= {"0", "1"}:
        raise ValueError("genre flags must be 0 or 1")
    released = _year_in(title) or (int(date[-4:]) if date[-4:].isdigit() else None)
    return _id(item), Item(released, tuple(place for place, flag in enumerate(flags) if flag == "1"))


def _year_in(title: str) -> int | None:
    years = re.findall(r"\((\d{4})\)", title)
    return int(years[-1]) if years else None


def _id(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"id {text!r} is not a positive whole number")
    return number


def _place(vocabulary: list[str], word: str, what: str) -> int:
    if word not in vocabulary:
        raise ValueError(f"{what} {word!r} is not one of {vocabulary}")
    return vocabulary.index(word)


def _assemble(
    path: Path, ratings: list[tuple[int, int, int, int]], users: dict[int, User], items: dict[int, Item]
) -> MovieLens:
    if not ratings:
        raise SourceError(f"{path} holds no ratings; fetch the file again")
    user_R, item_R, rating_R, time_R = np.array(ratings, dtype=np.int64).T
    for what, ids_R, known in (("user", user_R, users), ("item", item_R, items)):
        strange = np.flatnonzero(~np.isin(ids_R, list(known)))
        if strange.size:
            raise SourceError(f"{path}: {what} {ids_R[strange[0]]} has ratings but no line in the {what} file")
    order = np.lexsort((item_R, user_R, time_R))
    return MovieLens(
        user_R=user_R[order],
        item_R=item_R[order],
        rating_R=rating_R[order],
        time_R=time_R[order],
        users=users,
        items=items,
    )
