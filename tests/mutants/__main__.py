"""The command: `python -m tests.mutants [-n 60] [--seed 0] [--paths rayrec/data …] [--tests tests/data …]`."""

from __future__ import annotations

import argparse
import difflib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.mutants.equivalent import why_equivalent
from tests.mutants.judge import HUNG, KILLED, SURVIVED, UNREACHED, Judge
from tests.mutants.mutants import Mutant, sample
from tests.mutants.reach import Reach, digest, measure

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
PACKAGES = [f"rayrec/{name}" for name in ("data", "distributed", "checkpoint", "optim", "metrics", "train")]
SAME = "equivalent"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of one fault.

    Args:
        by: the test that failed, or the reason for which the fault changes nothing.
        tests: how many tests reach it.
        basis: digest of the source, and of the tests where none of them failed.
    """

    mutant: Mutant
    change: str
    verdict: str
    by: str
    tests: int
    basis: str


def main() -> None:
    arguments = parse()
    drawn = sample(ROOT, arguments.paths, arguments.n, arguments.seed)
    reach = measure(ROOT, BUILD / "reach", arguments.tests, arguments.anew)
    kept = BUILD / f"seed-{arguments.seed}.json"
    known = read(kept)
    end, rows = time.monotonic() + arguments.minutes * 60, []
    random.Random(arguments.seed).shuffle(drawn)  # those tried so far are a random sample too
    with tempfile.TemporaryDirectory(prefix="rayrec-mutants-") as folder:
        judge = Judge(ROOT, Path(folder) / "copy")
        for number, mutant in enumerate(drawn, start=1):
            chosen = Chosen.of(mutant, reach, arguments.seconds)
            row = known.get(mutant)
            if row is None or row.basis not in (chosen.source, chosen.basis):
                if time.monotonic() > end:
                    print(f"{arguments.minutes} minutes are over: the same command goes on where this one stopped")
                    break
                row = attempt(judge, mutant, chosen)
                print(f"{number}/{len(drawn)} {row.verdict}: {place(mutant)} {row.change} {row.by}", flush=True)
            rows.append(row)
            known[mutant] = row
            kept.write_text(json.dumps([asdict(row) for row in known.values()]))
    report(sorted(rows, key=lambda row: (row.mutant.path, row.mutant.line)), len(drawn), arguments.seed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Puts random faults into the code and tells which ones tests notice.")
    parser.add_argument("-n", type=int, default=60, help="how many faults (60)")
    parser.add_argument("--seed", type=int, default=0, help="draws other faults (0)")
    parser.add_argument("--paths", nargs="+", default=PACKAGES, help="files and folders to put faults into")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests to choose from; fast ones only")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one fault, quick ones first (30)")
    parser.add_argument(
        "--minutes", type=float, default=60, help="after which no further fault is begun (60); run again to go on"
    )
    parser.add_argument("--anew", action="store_true", help="run all fast tests again to see which lines they run")
    return parser.parse_args()


@dataclass(frozen=True)
class Chosen:
    """The tests for one fault.

    Args:
        readers: read the sources, and are tried first.
        near: run the line.
        seconds: of all, without a fault.
    """

    readers: Sequence[str]
    near: Sequence[str]
    seconds: float
    source: str
    basis: str

    @classmethod
    def of(cls, mutant: Mutant, reach: Reach, most_s: float) -> Chosen:
        readers = reach.readers(ROOT, mutant.path, mutant.line)
        near = reach.of(ROOT, mutant.path, mutant.line, most_s)
        source = digest(ROOT / mutant.path)
        files = sorted({test.split("::")[0] for test in (*readers, *near)})
        basis = "-".join([source, str(len(near)), *(digest(ROOT / file)[:4] for file in files)])
        return cls(readers, near, sum(reach.seconds[test] for test in (*readers, *near)), source, basis)


def attempt(judge: Judge, mutant: Mutant, chosen: Chosen) -> Tried:
    verdict, by = judge.verdict(mutant, [*chosen.readers, *chosen.near], chosen.seconds)
    basis = chosen.source if verdict in (KILLED, HUNG) else chosen.basis
    if verdict == SURVIVED and not (chosen.near or chosen.readers):
        verdict = UNREACHED
    text = change(mutant)
    if verdict == SURVIVED and (reason := why_equivalent(mutant.path, text)) is not None:
        verdict, by = SAME, reason
    return Tried(mutant=mutant, change=text, verdict=verdict, by=by, tests=len(chosen.near), basis=basis)


def read(kept: Path) -> dict[Mutant, Tried]:
    """What an earlier run with the same seed found."""
    if not kept.exists():
        return {}
    rows = [Tried(**{**row, "mutant": Mutant(**row["mutant"])}) for row in json.loads(kept.read_text())]
    return {row.mutant: row for row in rows}


def place(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.line}"


@cache
def change(mutant: Mutant) -> str:
    """The line as it was and as it became."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    lines = list(difflib.ndiff(before.splitlines(), mutant.source(before).splitlines()))
    old, new = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return f"`{old}` → `{new}`"


def report(rows: Sequence[Tried], drawn: int, seed: int) -> None:
    """Prints the table of what was not noticed, and keeps all of it in `build/mutants/seed-N.md`."""
    table = ["| file | change | verdict | by |", "|---|---|---|---|"]
    table += [
        f"| {place(row.mutant)} | {row.change.replace('|', chr(92) + '|')} | {row.verdict} | {row.by} |" for row in rows
    ]
    count = Counter(row.verdict for row in rows)
    killed, reached = count[KILLED] + count[HUNG], len(rows) - count[UNREACHED] - count[SAME]
    summary = (
        f"Seed {seed}: {len(rows)} of {drawn} faults tried. {killed} of {reached} in reach of fast tests were noticed "
        f"({killed / max(reached, 1):.1%}), {count[SURVIVED]} not. {count[SAME]} change nothing; "
        f"{count[UNREACHED]} are in reach of no fast test."
    )
    (BUILD / f"seed-{seed}.md").write_text("\n".join([summary, "", *table, ""]))
    print("\n".join(["", *(row for row in table if "| killed" not in row), "", summary]))


if __name__ == "__main__":
    main()
