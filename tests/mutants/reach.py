"""Which test runs which line: the fast tests under coverage, with the test as context, kept until the tests change.

A fast test is one without the marks `slow`, `long` and `gpu` that starts no Ray in its own process. What is kept in
`build/mutants/reach` is a file for each test file; it holds until that test file or a helper of it has changed. Where a
source has changed, its lines are followed from the old text to the new one, and a new line counts as run by the tests
of the function around it; `--anew` runs all tests again.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage

from tests.mutants.contexts import CONFIG, SPENT, VARIABLE, Spent, uses

FAST = "not slow and not long and not gpu"
TOGETHER = 20  # test files of one run of pytest, after which its findings are written down
STARTS_RAY = re.compile(r"^import ray|Trainer\(|\.fit\(", re.MULTILINE)
# Tests that read sources instead of running them, each with the path and the text of the lines that it reads.
READERS = {
    "tests/test_architecture.py::test_dataclasses_are_frozen": ("rayrec/", "@dataclass"),
    "tests/test_readme.py::test_config_reference_is_up_to_date": ("rayrec/train/config/", ""),
}
TEXTS = "sources"  # as they were when the tests ran
SHARED = ("tests/conftest.py", "tests/ranks.py", "tests/preload.py")


@dataclass(frozen=True)
class Reach:
    """What the coverage runs found.

    Args:
        tests: by file and line, the fast tests that run it.
        seconds: by fast test that passed.
    """

    tests: Mapping[str, Mapping[int, Sequence[str]]]
    seconds: Mapping[str, float]

    def readers(self, root: Path, path: str, line: int) -> list[str]:
        """Tests that read a line."""
        text = (root / path).read_text(encoding="utf-8").splitlines()[line - 1]
        places = ((test, *READERS[test]) for test in READERS if test in self.seconds)
        return [test for test, below, part in places if path.startswith(below) and part in text]

    def of(self, root: Path, path: str, line: int, most_s: float) -> list[str]:
        """Tests that run a line, quick ones first, as many as fit into `most_s` seconds.

        For a line that runs at import: those that run the function whose default value it has; those that run a line
        which names the constant, or the class whose field it is; else any of the file. And those of test files that
        name what it is of: defaults are looked up.
        """
        everywhere = {path: range(1, sys.maxsize)}
        for places in (*_places_of(root, path, line), everywhere):
            found = {
                test
                for file, lines in places.items()
                for number, tests in self.tests.get(file, {}).items()
                if number in lines
                for test in tests
            }
            if found := found & set(self.seconds):
                break
        files = _test_files_that_name(root, names) if (names := tuple(_names_at_import(root, path, line))) else set()
        found |= {test for test in self.seconds if test.split("::")[0] in files}
        chosen, left = [], most_s
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def _names_at_import(root: Path, path: str, line: int) -> list[str]:
    """What a line that runs at import belongs to: a constant, or the class or function whose default it has."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    around = [node for node in ast.walk(tree) if isinstance(node, _HOLDERS) and line in _span(node)]
    around.sort(key=lambda node: len(_span(node)), reverse=True)
    if any(isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno for node in around):
        return []
    return [node.name for node in around if not node.name.startswith("__")][-1:] or _names_bound(tree, line)


@cache
def _test_files_that_name(root: Path, names: tuple[str, ...]) -> set[str]:
    wanted = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    files = (root / "tests").rglob("test_*.py")
    return {file.relative_to(root).as_posix() for file in files if wanted.search(file.read_text(encoding="utf-8"))}


Places = dict[str, Collection[int]]


def _places_of(root: Path, path: str, line: int) -> Iterator[Places]:
    """Lines by file whose tests may notice a fault in a line, the nearest first."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    around = [(span, node) for node in ast.walk(tree) if line in (span := _span(node)) and isinstance(node, _HOLDERS)]
    around.sort(key=lambda pair: len(pair[0]))
    functions = [node for _, node in around if isinstance(node, ast.FunctionDef)]
    if functions and line >= functions[0].body[0].lineno:
        yield {path: [line]}
    elif not functions:  # only the test that is the first to import it has run the line
        names = [node.name for _, node in around] or _names_bound(tree, line)
        uses = _uses(root, tuple(names))
        yield {**uses, path: {*uses.get(path, ()), *(number for span, _ in around for number in span)}}
    for span, _ in around:
        yield {path: span}


_HOLDERS = (ast.FunctionDef, ast.ClassDef)


def _span(node: ast.AST) -> range:
    """Lines of a function, with its decorators, or of another statement."""
    start = min([getattr(node, "lineno", 0), *(each.lineno for each in getattr(node, "decorator_list", []))])
    return range(start, (getattr(node, "end_lineno", 0) or 0) + 1)


def _names_bound(tree: ast.Module, line: int) -> list[str]:
    """What a statement of the module gives values to."""
    statement = next((node for node in tree.body if line in _span(node)), None)
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


@cache
def _uses(root: Path, names: tuple[str, ...]) -> Places:
    """Lines of the package that name one of `names`."""
    found: Places = {}
    wanted = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for file in sorted((root / "rayrec").rglob("*.py")) if names else ():
        lines = file.read_text(encoding="utf-8").splitlines()
        if numbers := [number for number, text in enumerate(lines, start=1) if wanted.search(text)]:
            found[file.relative_to(root).as_posix()] = numbers
    return found


@dataclass(frozen=True)
class Findings:
    """Of one test file.

    Args:
        sources: digests of all files that its tests ran.
        seconds: by fast test that passed.
        lines: by source and line, places of its tests in `seconds`.
    """

    sources: Mapping[str, str]
    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[str, Sequence[int]]]

    def hold(self, root: Path) -> bool:
        """Whether the tests are the same."""
        tests = {path: known for path, known in self.sources.items() if not path.startswith("rayrec/")}
        return all(digest(root / path) == known for path, known in tests.items())


@cache
def digest(path: Path) -> str:
    """Of a file's text; the empty one for no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def measure(root: Path, folder: Path, tests: Sequence[str], anew: bool = False) -> Reach:
    """Runs the fast tests of those files under `tests` for which `folder` has nothing that still holds."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _test_files(root, tests)
    (folder / TEXTS).mkdir(exist_ok=True)
    stale = [path for path in files if anew or not _kept(root, folder, path)]
    for group in _groups(root, stale):
        for path, findings in _run(root, group).items():
            _place(folder, path).write_text(json.dumps(vars(findings)))
            for source, known in findings.sources.items():
                if source.startswith("rayrec/") and not (folder / TEXTS / known).exists():
                    shutil.copyfile(root / source, folder / TEXTS / known)
    return _merged(root, folder, [Findings(**json.loads(_place(folder, path).read_text())) for path in files])


def _groups(root: Path, files: Sequence[str]) -> list[list[str]]:
    """Files for one run of pytest each; those alone of which a test may leave a Ray up for the next ones."""
    alone = [file for file in files if STARTS_RAY.search((root / file).read_text(encoding="utf-8"))]
    others = [file for file in files if file not in alone]
    return [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)] + [[file] for file in alone]


def _test_files(root: Path, tests: Sequence[str]) -> list[str]:
    found: set[Path] = set()
    for path in tests:
        whole = root / path
        found |= {whole} if whole.is_file() else set(whole.rglob("test_*.py"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def _place(folder: Path, test_file: str) -> Path:
    return folder / (test_file.replace("/", "-") + ".json")


def _kept(root: Path, folder: Path, test_file: str) -> bool:
    place = _place(folder, test_file)
    return place.exists() and Findings(**json.loads(place.read_text())).hold(root)


def _merged(root: Path, folder: Path, kept: Iterable[Findings]) -> Reach:
    tests: dict[str, dict[int, list[str]]] = {}
    seconds: dict[str, float] = {}
    for one in kept:
        names = list(one.seconds)
        seconds |= one.seconds
        for path, lines in one.lines.items():
            now = lines_now(folder / TEXTS / one.sources[path], root / path)
            by_line = tests.setdefault(path, {})
            for line, places in lines.items():
                if int(line) in now:
                    by_line.setdefault(now[int(line)], []).extend(names[place] for place in places)
    return Reach(tests, seconds)


@cache
def lines_now(before: Path, after: Path) -> Mapping[int, int]:
    """Where the lines of a file, from 1, are in its later version, as far as they are there."""
    old, new = (path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for path in (before, after))
    if old == new:
        return {line: line for line in range(1, len(old) + 1)}
    same = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {a + n + 1: b + n + 1 for a, b, size in same for n in range(size)}


def _run(root: Path, test_files: Sequence[str]) -> dict[str, Findings]:
    """Findings of some test files, from one run of pytest."""
    with tempfile.TemporaryDirectory(prefix="rayrec-reach-") as name:
        folder = Path(name)
        config = folder / CONFIG
        where = f"source =\n    {root / 'rayrec'}\n    {root / 'tests'}\n"
        config.write_text(f"[run]\n{where}data_file = {folder / 'lines'}\nparallel = true\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.contexts", "-m", FAST, *test_files]
        print(f"which test runs which line: {len(test_files)} files from {test_files[0]}", flush=True)
        done = subprocess.run(command, cwd=root, env={**os.environ, VARIABLE: str(config)})
        if done.returncode not in (0, 1, 5):  # tests that fail do not count; some files have none that is fast
            raise RuntimeError(f"pytest ended with {done.returncode}")
        data = coverage.CoverageData(basename=str(folder / "all"), no_disk=True)
        for part in folder.glob("lines.*"):
            one = coverage.CoverageData(basename=str(part))
            one.read()
            data.update(one)
        lines = {str(Path(path).relative_to(root)): data.contexts_by_lineno(path) for path in data.measured_files()}
        spent = Spent(**json.loads((folder / SPENT).read_text()))
    return {path: _findings(root, path, lines, spent) for path in test_files}


def _findings(root: Path, test_file: str, lines: Mapping[str, Mapping[int, Sequence[str]]], spent: Spent) -> Findings:
    own = [test for test in spent.seconds if test.split("::")[0] == test_file]
    bad = {*spent.failed, *spent.on_ray}
    good = [test for test in own if test not in bad]
    contexts = {context for by_line in lines.values() for found in by_line.values() for context in found}
    of_context = {one: {test for test in own if uses(one, test, spent.fixtures.get(test, ()))} for one in contexts}
    places = {test: place for place, test in enumerate(good)}
    reached: dict[str, dict[str, list[int]]] = {}
    ran = {test_file, *SHARED}
    for path, by_line in lines.items():
        for line, found in by_line.items():
            tests = set().union(*(of_context[context] for context in found))
            if tests:
                ran.add(path)
            if path.startswith("rayrec/") and (near := sorted(places[test] for test in tests if test in places)):
                reached.setdefault(path, {})[str(line)] = near
    return Findings(
        sources={path: digest(root / path) for path in sorted(ran)},
        seconds={test: spent.seconds[test] for test in good},
        lines=reached,
    )
