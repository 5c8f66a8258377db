"""The faults that `make mutants` draws, and the choice of tests for them."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.mutants import mutants_of, sample
from tests.mutants.reach import Reach

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


def test_a_line_that_runs_at_import_takes_the_tests_of_its_function(tmp_path: Path) -> None:
    path = write(tmp_path)
    reach = Reach({path: {2: ["small", "large"], 3: ["large"]}}, {"small": 0.1, "large": 5.0})
    assert reach.of(tmp_path, path, 3, most_s=60) == ["large"]
    assert reach.of(tmp_path, path, 1, most_s=60) == ["small", "large"]
    assert reach.of(tmp_path, path, 1, most_s=1) == ["small"]
    assert Reach({}, {}).of(tmp_path, path, 3, most_s=60) == []
