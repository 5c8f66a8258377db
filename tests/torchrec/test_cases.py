"""Every case gives what TorchRec gave, or differs where that is meant. TorchRec itself is not needed."""

from __future__ import annotations

import pytest

from tests.torchrec.case import HERE, SECTIONS, Case, cases, lines, recorded
from tests.torchrec.package import difference

WRITTEN = [section for section in SECTIONS if (HERE / f"cases_{section}.py").exists()]
ALL = [(section, case) for section in WRITTEN for case in cases(section)]


@pytest.mark.parametrize(("section", "case"), ALL, ids=[f"{section}-{case.name}" for section, case in ALL])
def test_the_answer_is_torchrecs(section: str, case: Case) -> None:
    theirs, ours = recorded(section)[case.name], case.result("rayrec.torchrec")
    found = difference(ours, theirs)
    if case.meant is None and found is not None:
        pytest.fail(f"{case.line}: rayrec's answer and TorchRec's differ at {found}", pytrace=False)
    if case.meant is not None and found is None:
        pytest.fail(f"{case.line}: no longer differs; take the reason back: {case.meant}", pytrace=False)


def test_cases_name_lines_of_the_table_and_themselves_once() -> None:
    table = lines()
    assert {case.line for _, case in ALL} <= set(table)
    names = [(section, case.name) for section, case in ALL]
    assert len(names) == len(set(names))
