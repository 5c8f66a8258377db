"""The guide in rayrec/torchrec: its steps run, it lists every difference that is meant and what is not offered."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rayrec.torchrec.not_offered import MODULES, NotOffered
from tests.torchrec.case import SECTIONS, cases
from tests.torchrec.names import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "rayrec" / "torchrec" / "README.md").read_text(encoding="utf-8")


def test_the_ten_steps_run() -> None:
    blocks = re.findall(r"^ +```python\n(.*?)^ +```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9  # the first step is an installation
    code = "\n".join(textwrap.dedent(block) for block in blocks)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_difference_that_is_meant_is_told() -> None:
    made = [section for section in SECTIONS if (Path(__file__).parent / f"cases_{section}.py").exists()]
    reasons = {case.meant for section in made for case in cases(section) if case.meant}
    assert not [reason for reason in reasons if reason not in TEXT]


def test_the_table_of_names_is_as_the_cases_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.torchrec.names"


@pytest.mark.parametrize("name", list(MODULES))
def test_what_is_not_offered_says_what_to_use(name: str) -> None:
    with pytest.raises(NotOffered) as error:
        importlib.import_module(name)
    assert MODULES[name] in str(error.value) and name.removeprefix("rayrec.torchrec.") in TEXT
