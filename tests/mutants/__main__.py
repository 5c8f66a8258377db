"""The command: `python -m tests.mutants [-n 60] [--seed 0] [--paths rayrec/data …] [--tests tests/data …]`."""

from __future__ import annotations

import argparse
import difflib
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.mutants.judge import HUNG, KILLED, SURVIVED, UNREACHED, Judge
from tests.mutants.mutants import Mutant, sample
from tests.mutants.reach import measure

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
PACKAGES = [f"rayrec/{name}" for name in ("data", "distributed", "checkpoint", "optim", "metrics", "train")]


def main() -> None:
    arguments = parse()
    drawn = sample(ROOT, arguments.paths, arguments.n, arguments.seed)
    reach = measure(ROOT, BUILD, arguments.tests)
    start, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="rayrec-mutants-") as folder:
        judge = Judge(ROOT, Path(folder) / "copy")
        for number, mutant in enumerate(drawn, start=1):
            if time.monotonic() - start > arguments.minutes * 60:
                print(f"{arguments.minutes} minutes are over: {len(drawn) - number + 1} faults were not tried")
                break
            tests = reach.of(ROOT, mutant.path, mutant.line, arguments.seconds)
            verdict = judge.verdict(mutant, tests, sum(reach.seconds[test] for test in tests))
            rows.append((mutant, change(mutant), verdict, len(tests)))
            print(
                f"{number}/{len(drawn)} {verdict}: {mutant.path}:{mutant.line} {rows[-1][1]} ({len(tests)} tests)",
                flush=True,
            )
    report(rows, arguments, time.monotonic() - start)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Puts random faults into the code and tells which ones tests notice.")
    parser.add_argument("-n", type=int, default=60, help="how many faults (60)")
    parser.add_argument("--seed", type=int, default=0, help="draws other faults (0)")
    parser.add_argument("--paths", nargs="+", default=PACKAGES, help="files and folders to put faults into")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests to choose from; fast ones only")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one fault, quick ones first (30)")
    parser.add_argument("--minutes", type=float, default=60, help="for all faults (60)")
    return parser.parse_args()


def change(mutant: Mutant) -> str:
    """The line as it was and as it became."""
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    lines = list(difflib.ndiff(before.splitlines(), mutant.source(before).splitlines()))
    old, new = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return f"`{old}` → `{new}`"


def report(rows: list[tuple[Mutant, str, str, int]], arguments: argparse.Namespace, seconds: float) -> None:
    """Prints the table of what was not noticed, and keeps all of it in `build/mutants/report.md`."""
    table = ["| file | change | verdict | tests |", "|---|---|---|---|"]
    table += [
        f"| {m.path}:{m.line} | {text.replace('|', chr(92) + '|')} | {verdict} | {tests} |"
        for m, text, verdict, tests in rows
    ]
    count = Counter(verdict for *_, verdict, _ in rows)
    killed, reached = count[KILLED] + count[HUNG], len(rows) - count[UNREACHED]
    summary = (
        f"{killed} of {reached} faults in reach of fast tests were noticed ({killed / max(reached, 1):.0%}), "
        f"{count[SURVIVED]} not; {count[UNREACHED]} were in reach of none. "
        f"Seed {arguments.seed}, {seconds / 60:.0f} minutes."
    )
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "report.md").write_text("\n".join([summary, "", *table, ""]))
    print("\n".join(["", *(row for row in table if "| killed" not in row), "", summary]))


if __name__ == "__main__":
    main()
