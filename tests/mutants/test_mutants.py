"""The faults that `make mutants` draws, and the choice of tests for them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.mutants.contexts import fixture_context, uses
from tests.mutants.equivalent import EQUIVALENT, why_equivalent
from tests.mutants.judge import KILLED, SURVIVED, Judge
from tests.mutants.mutants import mutants_of, sample
from tests.mutants.reach import Findings, Reach, digest, lines_now

ROOT = Path(__file__).resolve().parents[2]
CODE = """def grow(size: int, step: int = 1) -> int:
    if size > 9:
        return size - step
    return size + step
"""


def write(folder: Path) -> str:
    (folder / "grow.py").write_text(CODE)
    return "grow.py"


def test_every_fault_changes_its_own_line_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    mutants = mutants_of(tmp_path, path)
    assert {mutant.line for mutant in mutants} == {1, 2, 3, 4}
    for mutant in mutants:
        pairs = list(zip(CODE.splitlines(), mutant.source(CODE).splitlines(), strict=True))
        assert [n for n, (old, new) in enumerate(pairs, start=1) if old != new] == [mutant.line]


def test_a_seed_draws_the_same_sample_one_fault_a_line(tmp_path: Path) -> None:
    write(tmp_path)
    drawn = sample(tmp_path, ["grow.py"], 3, seed=5)
    assert drawn == sample(tmp_path, ["."], 3, seed=5)
    assert len({mutant.line for mutant in drawn}) == 3


def test_what_is_drawn_is_python(tmp_path: Path) -> None:
    """A star among the arguments is no product."""
    (tmp_path / "star.py").write_text("def grow(\n    *,\n    by: int,\n) -> int:\n    return by * 2\n")
    assert [mutant.line for mutant in mutants_of(tmp_path, "star.py") if mutant.line == 2]
    assert {mutant.line for seed in range(5) for mutant in sample(tmp_path, ["star.py"], 9, seed)} == {5}


def test_what_only_checks_or_saves_memory_is_equivalent() -> None:
    zipped = "`for a, b in zip(x, y, strict=True):` → `for a, b in zip(x, y, strict=False):`"
    assert "only checks" in str(why_equivalent("rayrec/distributed/plan/sharding_plan.py", zipped))
    assert why_equivalent("rayrec/torchrec/distributed/sharding_plan.py", zipped) is None
    assert why_equivalent("rayrec/a.py", zipped.replace("in zip(x, y", "in f(x")) is None
    fields = "`@dataclass(frozen=True, slots=True)` → `@dataclass(frozen=True, slots=False)`"
    assert "memory" in str(why_equivalent("rayrec/a.py", fields))
    assert why_equivalent("rayrec/a.py", fields.replace("slots=False", "slots=True")) is None
    tuned = "`_BLOCK = 16_384` → `_BLOCK =  16385`"
    assert "at a time" in str(why_equivalent("rayrec/data/arrays/hashing.py", tuned))
    assert why_equivalent("rayrec/data/arrays/hashing.py", tuned.replace("_BLOCK", "_FOLD")) is None
    assert why_equivalent("rayrec/data/mapping/a.py", tuned) is None


def test_what_several_tests_share_is_reached_by_all_of_them() -> None:
    made = fixture_context("tests/a/test_a.py", "model")
    assert uses(made, "tests/a/test_a.py::test_one", ["model", "tmp_path"])
    assert not uses(made, "tests/a/test_a.py::test_one", ["tmp_path"])
    assert not uses(made, "tests/a/test_b.py::test_one", ["model"])
    assert uses("tests/a/test_a.py::test_one", "tests/a/test_a.py::test_one", [])


def test_findings_hold_until_a_test_changes(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert Findings({path: digest(tmp_path / path), "rayrec/a.py": "any"}, {}, {}).hold(tmp_path)
    assert not Findings({path: "another"}, {}, {}).hold(tmp_path)
    assert not Findings({"gone.py": digest(tmp_path / path)}, {}, {}).hold(tmp_path)


def test_lines_are_followed_to_the_text_of_today(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", tmp_path / write(tmp_path)
    before.write_text(CODE.replace("    return size + step\n", "    size += 0\n    return size + step\n"))
    assert lines_now(before, after) == {1: 1, 2: 2, 3: 3, 5: 4}
    assert lines_now(before, tmp_path / "gone.py") == {}


def test_a_line_that_runs_at_import_takes_the_tests_of_its_function(tmp_path: Path) -> None:
    path = write(tmp_path)
    reach = Reach({path: {2: ["small", "large"], 3: ["large"]}}, {"small": 0.1, "large": 5.0})
    assert reach.of(tmp_path, path, 3, most_s=60) == ["large"]
    assert reach.of(tmp_path, path, 1, most_s=60) == ["small", "large"]
    assert reach.of(tmp_path, path, 1, most_s=1) == ["small"]
    assert Reach({}, {}).of(tmp_path, path, 3, most_s=60) == []


def test_a_constant_takes_the_tests_of_the_lines_that_name_it(tmp_path: Path) -> None:
    """Not the test that happened to import the module first."""
    (tmp_path / "rayrec").mkdir()
    (tmp_path / "rayrec" / "sizes.py").write_text(
        "SIZES = {\n    'a': 1,\n}\nOTHER = 2\n\n\nclass Shape:\n    wide: int = 3\n\n    def area(self): return 1\n"
    )
    (tmp_path / "rayrec" / "user.py").write_text("def user():\n    return SIZES['a']\n\n\ndef make(): return Shape()\n")
    tests = {
        "rayrec/sizes.py": {1: ["first"], 2: ["first"], 4: ["first"], 8: ["first"], 10: ["area"]},
        "rayrec/user.py": {2: ["reads"], 5: ["makes"]},
    }
    reach = Reach(tests, {"first": 0.1, "reads": 0.2, "makes": 0.2, "area": 0.3})
    assert reach.of(tmp_path, "rayrec/sizes.py", 2, most_s=60) == ["first", "reads"]
    assert reach.of(tmp_path, "rayrec/sizes.py", 8, most_s=60) == ["first", "makes", "area"]
    assert reach.of(tmp_path, "rayrec/sizes.py", 10, most_s=60) == ["area"]


def test_a_default_takes_the_tests_of_files_that_name_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "rayrec").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "rayrec" / "a.py").write_text(
        "LIMIT = 3\n\n\nclass Shape:\n    wide: int = 3\n\n    def __init__(self, deep: int = 4) -> None:\n"
        "        self.deep = deep + 5\n\n    def area(self, by: int = 6) -> int:\n        return by\n"
    )
    (tmp_path / "tests" / "test_shape.py").write_text("from rayrec.a import Shape\n")
    (tmp_path / "tests" / "test_limit.py").write_text("from rayrec.a import LIMIT\n")
    (tmp_path / "tests" / "test_area.py").write_text("shape.area()\n")
    names = ("shape", "limit", "area")
    seconds = {f"tests/test_{name}.py::test": 0.1 for name in names} | {"tests/test_b.py::test": 0.2}
    reach = Reach({"rayrec/a.py": {8: ["tests/test_b.py::test"]}}, seconds)

    def files(line: int) -> list[str]:
        return [test.split("_")[1].split(".")[0] for test in reach.of(tmp_path, "rayrec/a.py", line, most_s=60)]

    assert files(8) == ["b"]  # runs in the call alone
    assert files(7) == ["shape", "b"] and files(5) == ["shape", "b"] and files(10) == ["area", "b"]
    assert files(1) == ["limit", "b"]


def test_a_failure_that_is_not_the_faults_doing_does_not_count(tmp_path: Path) -> None:
    path, root = write(tmp_path), tmp_path
    (root / "test_grow.py").write_text(
        "from grow import grow\n\n"
        "def test_good():\n    assert grow(1) == 2\n\n"
        "def test_bad():\n    assert grow(1) == 0\n\n"
        "def test_blind():\n    pass\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    judge = Judge(root, tmp_path / "work" / "copy")
    mutant = next(one for one in mutants_of(root, path) if one.line == 4 and "size - step" in one.source(CODE))
    good, bad, blind = (f"test_grow.py::test_{name}" for name in ("good", "bad", "blind"))
    assert judge.verdict(mutant, [bad, blind, good], 1) == (KILLED, good)
    assert judge.verdict(mutant, [bad, blind], 1) == (SURVIVED, "")
    assert judge.verdict(mutant, [], 1) == (SURVIVED, "")


def test_an_equivalent_fault_is_named_by_what_it_changes_in_its_line() -> None:
    path = "rayrec/checkpoint/manifest.py"
    change = '`return json.dumps({**raw, "checksum": _checksum(raw)}, indent=1).encode()` → '
    change += '`return json.dumps({**raw, "checksum": _checksum(raw)}, indent= 2).encode()`'
    assert "layout only" in str(why_equivalent(path, change))
    assert why_equivalent(path, change.replace("indent= 2", "indent= 3")) is None
    assert why_equivalent(path, change.replace("indent= 2", "indent=1")) is None
    assert why_equivalent("rayrec/checkpoint/index.py", change) is None


def test_every_fault_that_is_named_could_be_put_in() -> None:
    """The line is still there."""
    for path, was, _, _ in EQUIVALENT:
        assert "".join(was.split()) in "".join((ROOT / path).read_text(encoding="utf-8").split()), (path, was)
