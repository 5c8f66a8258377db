"""Cases of the Criteo and MovieLens readers, on files that they write."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from torch.utils.data import IterDataPipe

from tests.torchrec.case import Cases
from tests.torchrec.package import Package, attempt

CASES = case = Cases()
CRITEO, MOVIES = "10/DEFAULT_CAT_NAMES", "10/movielens_20m"


@contextlib.contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name


def arrays(folder: str, name: str, rows: int, first: int = 0) -> list[str]:
    """Paths of dense, sparse and labels of so many rows."""
    dense = (np.arange(rows * 13).reshape(rows, 13) + first).astype(np.float32)
    sparse = ((np.arange(rows * 26).reshape(rows, 26) * 7 + first) % 1000).astype(np.int32)
    labels = ((np.arange(rows) + first) % 2).astype(np.int32).reshape(rows, 1)
    paths = [os.path.join(folder, f"{name}_{kind}.npy") for kind in ("dense", "sparse", "labels")]
    for path, array in zip(paths, (dense, sparse, labels), strict=True):
        np.save(path, array)
    return paths


def pipe(rec: Package, files: list[list[str]], **settings: Any) -> Any:
    dense, sparse, labels = (list(paths) for paths in zip(*files, strict=True))
    defaults = {"stage": "train", "batch_size": 4, "rank": 0, "world_size": 1}
    make = rec("datasets.criteo").InMemoryBinaryCriteoIterDataPipe
    return make(dense_paths=dense, sparse_paths=sparse, labels_paths=labels, **{**defaults, **settings})


def rows_of(batches: Any) -> list[list[int]]:
    """The numbers of the rows of each batch."""
    return [(batch.dense_features[:, 0] / 13).long().tolist() for batch in batches]


@case(CRITEO)
def batches_of_two_files(rec: Package) -> Any:
    with folder() as at:
        made = pipe(rec, [arrays(at, "a", 6), arrays(at, "b", 3, 1000)], hashes=[7 + place for place in range(26)])
        batches = list(made)
        return [len(made), [[batch.dense_features, batch.sparse_features, batch.labels] for batch in batches]]


@case(CRITEO)
def rows_of_every_rank(rec: Package) -> Any:
    found = []
    with folder() as at:
        files = {rows: [arrays(at, f"f{rows}", rows)] for rows in (1, 5, 17, 24)}
        for rows, world, drop, mmap in product(files, (1, 2, 3), (False, True), (False, True)):
            for rank in range(world):
                made = pipe(rec, files[rows], rank=rank, world_size=world, drop_last=drop, mmap_mode=mmap)
                found.append([len(made), rows_of(made)])
    return found


@case(CRITEO)
def rows_in_drawn_order(rec: Package) -> Any:
    return drawn(rec, 18)


@case(CRITEO, "all ranks have the same number of batches also with shuffled rows, so no rank waits forever")
def uneven_rows_in_drawn_order(rec: Package) -> Any:
    return drawn(rec, 17)


def drawn(rec: Package, count: int) -> Any:
    found = []
    with folder() as at:
        files = [arrays(at, "a", count)]
        for world, batches, rows, seed in product((1, 2), (False, True), (False, True), (0, 5)):
            for rank in range(world):
                made = pipe(
                    rec,
                    files,
                    rank=rank,
                    world_size=world,
                    shuffle_batches=batches,
                    shuffle_training_set=rows,
                    shuffle_training_set_random_seed=seed,
                )
                found.append([rows_of(made), rows_of(made)])
    return found


@case(CRITEO)
def halves_of_a_file(rec: Package) -> Any:
    found = []
    with folder() as at:
        files = {rows: [arrays(at, f"f{rows}", rows)] for rows in (7, 12)}
        for rows, stage, world in product(files, ("val", "test"), (1, 2)):
            for rank in range(world):
                made = pipe(rec, files[rows], stage=stage, rank=rank, world_size=world, shuffle_training_set=True)
                found.append(rows_of(made))
    return found


@case(CRITEO, "validation rows of several files are refused: some would be used for validation and test")
def halves_of_several_files(rec: Package) -> Any:
    with folder() as at:
        return rows_of(pipe(rec, [arrays(at, "a", 6), arrays(at, "b", 3)], stage="val"))


@case(CRITEO, "an unknown stage is refused; TorchRec reads all rows")
def another_stage(rec: Package) -> Any:
    with folder() as at:
        return rows_of(pipe(rec, [arrays(at, "a", 6)], stage="training"))


@case(CRITEO, "iopath's path handlers are refused: paths are opened as files")
def another_path_manager(rec: Package) -> Any:
    with folder() as at:
        return rows_of(pipe(rec, [arrays(at, "a", 6)], path_manager_key="mine"))


@case(CRITEO)
def parts_of_arrays(rec: Package) -> Any:
    home = rec("datasets.criteo").BinaryCriteoUtils
    ranges = [
        home.get_file_row_ranges_and_remainder([10, 7, 3], rank, world, start, last)
        for world in (1, 3, 8)
        for rank in range(world)
        for start, last in ((0, None), (5, 14))
    ]
    plain = [[{file: list(map(int, rows)) for file, rows in found.items()}, rest] for found, rest in ranges]
    with folder() as at:
        path = arrays(at, "a", 10)[0]
        parts = [attempt(lambda place=place: home.load_npy_range(path, *place).tolist()) for place in ((2, 3), (9, 5))]
        return [plain, parts, home.get_shape_from_npy(path)]


def log_of_clicks(folder: str, labels: bool = True) -> str:
    rows = []
    for place in range(5):
        numbers = ["" if (place + column) % 4 == 0 else str(place * column - 2) for column in range(13)]
        ids = ["" if (place + column) % 5 == 0 else f"{place * 1000 + column * 77:08x}" for column in range(26)]
        rows.append("\t".join([*([str(place % 2)] if labels else []), *numbers, *ids]))
    path = os.path.join(folder, f"log_{labels}.tsv")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(rows) + "\n")
    return path


@case(CRITEO)
def rows_of_text(rec: Package) -> Any:
    home = rec("datasets.criteo")
    with folder() as at:
        path, without = log_of_clicks(at), log_of_clicks(at, labels=False)
        pipes = [home.criteo_terabyte([path, path]), home.criteo_kaggle(path), home.criteo_kaggle(without)]
        pipes += [home.criteo_terabyte([path], row_mapper=None), home.criteo_kaggle(path).batch(2)]
        names = [isinstance(each, IterDataPipe) for each in pipes]
        return [
            names,
            [list(each) for each in pipes],
            home.PATH_MANAGER_KEY == "torchrec",
            len(home.COLUMN_TYPE_CASTERS),
        ]


@case(CRITEO)
def text_to_arrays(rec: Package) -> Any:
    home = rec("datasets.criteo").BinaryCriteoUtils
    with folder() as at:
        paths = [os.path.join(at, f"{name}.npy") for name in ("dense", "sparse", "labels")]
        home.tsv_to_npys(log_of_clicks(at), *paths)
        made = [np.load(path) for path in paths]
        return [[str(array.dtype), array.tolist()] for array in made]


@case(CRITEO)
def contiguous_ids(rec: Package) -> Any:
    home = rec("datasets.criteo").BinaryCriteoUtils
    with folder() as at:
        paths = [os.path.join(at, name) for name in ("a.npy", "b.npy")]
        np.save(paths[0], np.array([[5, 1], [5, 1], [5, 2], [0, 2], [0, 2], [7, 3], [7, 4]]))
        np.save(paths[1], np.array([[0, 4], [9, 4], [7, 1]]))
        with contextlib.redirect_stdout(io.StringIO()):
            home.sparse_to_contiguous(paths, at, columns=2)
        names = sorted(name for name in os.listdir(at) if "contig" in name)
        return [[name, np.load(os.path.join(at, name)).tolist()] for name in names]


@case(MOVIES)
def ratings(rec: Package) -> Any:
    home = rec("datasets.movielens")
    with folder() as at:
        for name, text in (
            ("ratings.csv", "userId,movieId,rating,timestamp\n1,296,5.0,1147880044\n2,306,,3\n"),
            ("movies.csv", 'movieId,title,genres\n296,"Pulp, Fiction (1994)",Comedy|Crime\n306,Red,Drama\n'),
        ):
            with open(os.path.join(at, name), "w", encoding="utf-8") as file:
                file.write(text)
        found = []
        for make in (home.movielens_20m, home.movielens_25m):
            found += [list(make(at)), list(make(at, include_movies_data=True)), list(make(at, row_mapper=None))]
        with open(os.path.join(at, "ratings.csv"), "a", encoding="utf-8") as file:
            file.write("3,1,1.0,1\n")
        found.append(attempt(lambda: list(home.movielens_20m(at, include_movies_data=True))))
    return [found, home.DEFAULT_COLUMN_NAMES, home.DEFAULT_MOVIES_COLUMN_NAMES, home.RATINGS_FILENAME]


@case(MOVIES)
def pipes_of_files(rec: Package) -> Any:
    home = rec("datasets.utils")
    with folder() as at:
        path = log_of_clicks(at)
        rows = home.ReadLinesFromCSV(home.LoadFiles([path], mode="r", length=1), delimiter="\t")
        both = list(home.ParallelReadConcat(rows, home.Limit(rows, 2)))
        lengths = [len(home.LoadFiles([path], length=1)), attempt(lambda: len(home.LoadFiles([path])))]
    casts = [home.safe_cast("4", int, 0), home.safe_cast("x", int, 7)]
    sides = [[f(lambda place: place, 0.7, 2, at) for at in (69, 70)] for f in (home.train_filter, home.val_filter)]
    return [len(both), both[-1], lengths, casts, sides]
