"""Reads the code cells out of the tutorials' files and makes scripts of them that run on rayrec and a CPU.

The tutorials lie beside the repository, not in it; nothing of their text is kept here.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "seeds"

# the package, and a CPU for the GPU
SWAPS = {
    "torchrec": "rayrec.torchrec",
    '"cuda"': '"cpu"',
    'backend="nccl"': 'backend="gloo"',
    '"nccl"\n': '"gloo"\n',  # as an argument; a comparison with it stays
    ".cuda()": "",
    "import multiprocess\n": "import multiprocessing as multiprocess\n",  # the tutorial's needs a package of its own
}


def folder() -> Path | None:
    """Where the tutorials are; None where they are not at hand."""
    place = Path(os.environ.get("RAYREC_SEEDS", BESIDE))
    return place if place.is_dir() else None


def _swapped(cells: list[str], port: int) -> list[str]:
    out = []
    for cell in cells:
        for old, new in SWAPS.items():
            cell = cell.replace(old, new)
        out.append(cell.replace("29500", str(port)))
    return out


def _dedent(block: str) -> str:
    return re.sub(r"^ {4}", "", block, flags=re.MULTILINE).strip() + "\n"


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def from_page(path: Path, port: int) -> list[str]:
    """Cells of a page whose code blocks are marked and indented."""
    blocks = re.findall(r"^\.\. code-block:: Python\n((?:\n|    .*\n)+)", path.read_text(), flags=re.MULTILINE)
    return _swapped([_dedent(block) for block in blocks], port)


def from_notebook(path: Path, port: int) -> list[str]:
    """Cells of a notebook's text, which marks where a cell begins but not where it ends: the longest part that is
    Python. Cells that only install or set paths are left out."""
    cells = []
    for part in re.split(r"^In \[(?:\d+|None)\]:\n", path.read_text(), flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        ends = [end for end in range(len(lines), 0, -1) if _parses("".join(lines[:end]))]
        code = "".join(lines[: ends[0]]) if ends else ""
        if ast.parse(code).body and "sys.path" not in code:
            cells.append(code)
    return _swapped(cells, port)


def from_markdown(path: Path, port: int) -> list[str]:
    """Cells of a markdown text, less its pictures of tables and commands for a shell."""
    blocks = re.findall(r"^```py\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return _swapped([block for block in blocks if _parses(block) and "install" not in block], port)
