"""Rows of the MovieLens files. For new code, convert them to Parquet with `data/movielens/prepare.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from rayrec.torchrec.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_COLUMN_NAMES[1:]]

Mapper = Callable[[list[str]], Any]


def _integer(text: str) -> int:
    return safe_cast(text, int, 0)


def _float(text: str) -> float:
    return safe_cast(text, float, 0.0)


COLUMN_TYPE_CASTERS: list[Callable[[str], int | float | str]] = [_integer, _integer, _float, _integer, str, str]


def as_columns(row: list[str]) -> dict[str, int | float | str]:
    """Returns the values of a row by column name; an empty cell is 0."""
    return {name: cast(text) for name, cast, text in zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, row, strict=False)}


class MovieLensIterDataPipe(IterDataPipe[Any]):
    """The ratings of a folder; see `movielens_20m`."""

    def __init__(
        self, root: str, include_movies_data: bool, row_mapper: Mapper | None, open_kw: dict[str, Any]
    ) -> None:
        super().__init__()
        self.root, self.include_movies_data = root, include_movies_data
        self.row_mapper, self.open_kw = row_mapper, open_kw

    def _lines(self, name: str) -> ReadLinesFromCSV:
        files = LoadFiles([os.path.join(self.root, name)], mode="r", **self.open_kw)
        return ReadLinesFromCSV(files, skip_first_line=True, delimiter=",")

    def __iter__(self) -> Iterator[Any]:
        movies = {row[0]: row[1:] for row in self._lines(MOVIES_FILENAME)} if self.include_movies_data else {}
        for row in self._lines(RATINGS_FILENAME):
            if self.include_movies_data:
                if row[1] not in movies:
                    raise KeyError(f"movie {row[1]!r} has a rating but is missing in {MOVIES_FILENAME} of {self.root}")
                row = [*row, *movies[row[1]]]
            yield row if self.row_mapper is None else self.row_mapper(row)


def movielens_20m(
    root: str, *, include_movies_data: bool = False, row_mapper: Mapper | None = as_columns, **open_kw: Any
) -> MovieLensIterDataPipe:
    """Returns the ratings of MovieLens 20M.

    Args:
        root: the folder of `ratings.csv` and `movies.csv`.
        include_movies_data: add the title and genres of the movie.
        row_mapper: maps the cells of a row to an item; None: the item is the list of cells.
        open_kw: keyword arguments of `open`.

    Raises:
        KeyError: iterating finds a rating of an unknown movie.
    """
    return MovieLensIterDataPipe(root, include_movies_data, row_mapper, open_kw)


def movielens_25m(
    root: str, *, include_movies_data: bool = False, row_mapper: Mapper | None = as_columns, **open_kw: Any
) -> MovieLensIterDataPipe:
    """Returns the ratings of MovieLens 25M; has the arguments of `movielens_20m`."""
    return MovieLensIterDataPipe(root, include_movies_data, row_mapper, open_kw)
