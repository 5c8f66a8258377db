#!/usr/bin/env python
"""Writes a log of plays in the order of time, of the shape of Yambda (MLPerf DLRMv4): `python data/synthetic/plays.py`.

Items are drawn by Zipf's law, lengths of users are lognormal, 1.9 % of plays are likes. A user plays items of some
kinds more often, likes them more, and changes kinds from time to time, so that histories tell what is liked next. A
file depends on the spec and its number only: it has the plays of one interval of time.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rayrec._runtime.strict import Strict
from rayrec.data.arrays.hashing import mix64_array, seed_of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

START_S = 1_700_006_400  # 2023-11-15 00:00 UTC
KINDS, LIKED, IN_TASTE = 16, 3, 0.5  # a user likes 3 kinds of 16, and half of the plays are of these
TASTE_EFFECT, ITEM_EFFECT = 2.5, 1.0


class PlaysSpec(Strict):
    """Parameters of the generated plays. The defaults have the proportions of Yambda-5b.

    Args:
        users: number of users.
        items: number of items.
        median, longest: plays of the median user, and most plays of a user.
        spread: deviation of the logarithm of the plays of a user; the mean is exp(spread² / 2) times the median.
        zipf: exponent of the frequencies of items.
        likes: fraction of the plays that are likes.
        days: days of the log.
        files: number of files, each of an equal part of the time.
        row_group_rows: rows of a row group.
        taste_days: days until a user changes kinds.
        seed: seed of the data.
    """

    users: int = Field(default=1000, ge=1)
    items: int = Field(default=10_000, ge=KINDS)
    median: float = Field(default=2695, gt=0)
    longest: int = Field(default=27_738, ge=1)
    spread: float = Field(default=1.133, ge=0)
    zipf: float = Field(default=1.05, gt=0)
    likes: float = Field(default=0.019, gt=0, lt=0.2)
    days: int = Field(default=300, ge=1)
    files: int = Field(default=10, ge=1)
    row_group_rows: int = Field(default=65_536, ge=1)
    taste_days: int = Field(default=60, ge=1)
    seed: int = 0

    @property
    def lengths(self) -> F64:
        """Expected plays of each user."""
        normal = np.random.default_rng([self.seed, 1]).normal(size=self.users)
        return np.minimum(self.median * np.exp(self.spread * normal), self.longest)


def write_plays(spec: PlaysSpec, folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Writes all files; yields each path when it is complete."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(spec.files):
        path = Path(folder) / f"plays-{number:05d}.parquet"
        partial = path.with_name(f"_{path.name}.part")
        pq.write_table(make_plays(spec, number)[0], partial, row_group_size=spec.row_group_rows)
        partial.rename(path)
        yield path


def make_plays(spec: PlaysSpec, number: int) -> tuple[pa.Table, F64]:
    """The rows of one file, and the probability of a like for each."""
    random = np.random.default_rng([spec.seed, 2, number])
    counts = random.poisson(spec.lengths / spec.files)
    rows, part_s = int(counts.sum()), spec.days * 86_400 / spec.files
    user = np.repeat(np.arange(spec.users), counts)
    at = START_S + (number * part_s + random.random(rows) * part_s).astype(np.int64)
    order = np.argsort(at, kind="stable")
    user, at = user[order], at[order]
    taste = (user * 7 + (at - START_S) // (spec.taste_days * 86_400) * 5) % KINDS
    in_taste = random.random(rows) < IN_TASTE
    kind = (
        taste + random.integers(0, LIKED, rows) + ~in_taste * random.integers(LIKED, KINDS - LIKED + 1, rows)
    ) % KINDS
    in_taste = (kind - taste) % KINDS < LIKED
    item = np.minimum(_zipf(spec, rows, random) // KINDS * KINDS + kind, spec.items - 1)
    in_taste = (item % KINDS - taste) % KINDS < LIKED
    effect = (mix64_array(item, seed_of(spec.seed, 3)) / float(1 << 64) - 0.5) * 2 * 3**0.5 * ITEM_EFFECT
    wide = 3**0.5 * ITEM_EFFECT
    mean = (IN_TASTE * math.exp(TASTE_EFFECT) + 1 - IN_TASTE) * math.sinh(wide) / wide
    probability = np.minimum(0.9, spec.likes * np.exp(TASTE_EFFECT * in_taste + effect) / mean)
    like = random.random(rows) < probability
    played = random.random(rows) < np.where(in_taste, 0.8, 0.3)
    action = np.where(like, 2, np.where(played, 1, 0)).astype(np.int8)
    columns = {
        "user": user,
        "at": pa.array(1000 * at, pa.timestamp("ms")),  # Parquet has no seconds
        "item": item,
        "action": pa.DictionaryArray.from_arrays(pa.array(action), pa.array(["skip", "play", "like"])),
        "like": like.astype(np.int8),
        "played": (like | played).astype(np.int8),
    }
    return pa.table(columns), probability


def best_auc(spec: PlaysSpec, number: int) -> float:
    """AUC of the probabilities from which the likes of a file were drawn: the upper bound for any model."""
    table, probability = make_plays(spec, number)
    label = table["like"].to_numpy()
    _, inverse, counts = np.unique(probability, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties have their mean rank
    positives = int(label.sum())
    return float((ranks[label == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(label) - positives)))


def _zipf(spec: PlaysSpec, count: int, random: np.random.Generator) -> I64:
    """Ids in `[0, items)`; the frequency of id k is about proportional to (k + 1) ** -zipf."""
    power, unit = 1 - spec.zipf, random.random(count)
    if abs(power) < 1e-6:
        ids = np.power(spec.items + 1.0, unit) - 1
    else:
        ids = np.power(1 + unit * (np.power(spec.items + 1.0, power) - 1), 1 / power) - 1
    return np.minimum(ids.astype(np.int64), spec.items - 1)


def main(argv: list[str] | None = None) -> int:
    """Writes the files and prints the best AUC of the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, field in PlaysSpec.model_fields.items():
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=field.default, help=" ")
    parser.add_argument("--out", type=Path, default=Path("data/synthetic/plays"), help="output folder")
    args = parser.parse_args(argv)
    spec = PlaysSpec(**{name: getattr(args, name) for name in PlaysSpec.model_fields})
    rows = sum(pq.read_metadata(path).num_rows for path in write_plays(spec, args.out))
    print(f"{rows:,} plays of {spec.users:,} users in {spec.files} files in {args.out}")
    print(f"AUC of the planted signal in the last file: {best_auc(spec, spec.files - 1):.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
