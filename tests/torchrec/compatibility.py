"""What is left out: `python -m tests.torchrec.compatibility` writes `rayrec/torchrec/COMPATIBILITY.md` from the tables
that the errors are made of."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

from rayrec.torchrec.left_out import MODULES
from rayrec.torchrec.left_out_names import NAMES

PAGE = Path(__file__).resolve().parents[2] / "rayrec" / "torchrec" / "COMPATIBILITY.md"
HEAD = """# Which programs run, and what is left out

Importing a module or name of the last two tables raises `NotOffered`, with the text of the right column. All other
public classes and functions of TorchRec 1.8 are there. `python -m rayrec.torchrec --check program.py` lists what a
program uses of these; [the table of names](NAMES.md) says how they compare.
`python -m tests.torchrec.compatibility` writes this page from `left_out.py`, `left_out_names.py` and the programs'
recorded figures; a test compares it with the list of TorchRec's public names.
"""
PROGRAMS = """
## Programs

Each of these is written for TorchRec and runs unchanged: `python -m rayrec.torchrec tests/torchrec/programs/NAME.py`.
Its figures (losses, scores, areas under the curve) equal those that it gives under TorchRec 1.8, to 1e-5; a test
compares them.

| program | what it does | ranks | edits | figures that are equal |
|---|---|---|---|---|
"""
FOLDER = Path(__file__).parent


def programs() -> str:
    """A row for each program that TorchRec's figures are recorded of."""
    text = PROGRAMS
    for name, figures in json.loads((FOLDER / "recorded" / "programs.json").read_text(encoding="utf-8")).items():
        source = (FOLDER / "programs" / f"{name}.py").read_text(encoding="utf-8")
        what, ranks = ast.get_docstring(ast.parse(source)), 2 if "start_processes(" in source else 1
        text += f"| `{name}` | {what} | {ranks} | none | {len(figures)} |\n"
    return text


def rows(alternatives: Iterable[tuple[str, str]]) -> str:
    """A row for each alternative, with everything that it replaces."""
    replaced: dict[str, list[str]] = {}
    for text, instead in alternatives:
        replaced.setdefault(instead, []).append(text)
    return "".join(f"| {', '.join(texts)} | {instead} |\n" for instead, texts in replaced.items())


def page() -> str:
    modules = ((f"`{module}`", instead) for module, instead in MODULES.items())
    names = ((f"`{module}.{name}`", instead) for module, names, instead in NAMES for name in names.split())
    return (
        f"{HEAD}{programs()}\n## Modules, with everything in them\n\n| modules | instead |\n|---|---|\n{rows(modules)}"
        f"\n## Names\n\n| names | instead |\n|---|---|\n{rows(names)}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
