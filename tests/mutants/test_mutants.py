"""The faults that `make mutants` draws, and the choice of tests for them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.mutants.contexts import fixture_context, uses
from tests.mutants.judge import KILLED, SURVIVED, Judge
from tests.mutants.mutants import mutants_of, sample
from tests.mutants.reach import Findings, Reach, digest, lines_now

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
