"""The guide in rayrec/torchrec: its steps run, it lists every difference that is meant and what is not offered."""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from pathlib import Path

import pytest

from rayrec.torchrec.left_out import MODULES
from rayrec.torchrec.left_out_names import NAMES
from rayrec.torchrec.not_offered import NotOffered
from tests.forked import run_forked
from tests.torchrec import compatibility
from tests.torchrec.case import SECTIONS, cases
from tests.torchrec.names import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "rayrec" / "torchrec" / "README.md").read_text(encoding="utf-8")


def test_the_ten_steps_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^ +```python\n(.*?)^ +```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9  # the first step is an installation
    code = "\n".join(textwrap.dedent(block) for block in blocks)
    (tmp_path / "steps.py").write_text(code)
    done = run_forked(tmp_path / "steps.py", ROOT, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_difference_that_is_meant_is_told() -> None:
    made = [section for section in SECTIONS if (Path(__file__).parent / f"cases_{section}.py").exists()]
    reasons = {case.meant for section in made for case in cases(section) if case.meant}
    assert not [reason for reason in reasons if reason not in TEXT]


def test_the_table_of_names_is_as_the_cases_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.torchrec.names"


def test_the_list_of_what_is_left_out_is_current() -> None:
    text = compatibility.PAGE.read_text(encoding="utf-8")
    assert text == compatibility.page(), "run python -m tests.torchrec.compatibility"


@pytest.mark.parametrize("name", list(MODULES))
def test_a_module_that_is_not_offered_says_what_to_use(name: str) -> None:
    with pytest.raises(NotOffered) as error:
        importlib.import_module(f"rayrec.torchrec.{name}")
    assert MODULES[name] in str(error.value)
    package, _, last = f"rayrec.torchrec.{name}".rpartition(".")
    with pytest.raises(NotOffered):  # from package import last
        getattr(importlib.import_module(package), last)


@pytest.mark.parametrize(("module", "names", "instead"), NAMES)
def test_a_name_that_is_not_offered_says_what_to_use(module: str, names: str, instead: str) -> None:
    home = importlib.import_module(f"rayrec.torchrec.{module}")
    for name in names.split():
        with pytest.raises(NotOffered, match=re.escape(f"has no {name}: {instead}")):
            getattr(home, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(home, "nothing")  # noqa: B009


PUBLIC = json.loads((Path(__file__).parent / "recorded" / "public.json").read_text(encoding="utf-8"))


def test_every_public_name_of_torchrec_is_there_or_says_what_to_use() -> None:
    silent, spare = [], {(module, name) for module, names, _ in NAMES for name in names.split()}
    for module, names in PUBLIC.items():
        try:
            home = importlib.import_module(f"rayrec.torchrec.{module}")
        except NotOffered:
            continue
        for name in names:
            try:
                getattr(home, name)
            except NotOffered:
                spare.discard((module, name))
            except AttributeError:
                silent.append(f"{module}.{name}")
    assert not silent and not spare
