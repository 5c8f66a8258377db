"""What is left out: `python -m tests.torchrec.compatibility` writes `rayrec/torchrec/COMPATIBILITY.md` from the tables
that the errors are made of."""

from __future__ import annotations

from pathlib import Path

from rayrec.torchrec.left_out import MODULES
from rayrec.torchrec.left_out_names import NAMES

PAGE = Path(__file__).resolve().parents[2] / "rayrec" / "torchrec" / "COMPATIBILITY.md"
HEAD = """# What of TorchRec is left out

Importing one of these raises `NotOffered`, with the text of the right column. All other public classes and functions of
TorchRec 1.8 are there. `python -m rayrec.torchrec --check program.py` lists what a program uses of these;
[the table of names](NAMES.md) says how they compare. Written by
`python -m tests.torchrec.compatibility` from `left_out.py` and `left_out_names.py`; a test compares it with the list of
TorchRec's public names.
"""


def page() -> str:
    text = HEAD + "\n## Modules, and what lies in them\n\n| module | instead |\n|---|---|\n"
    text += "".join(f"| `{module}` | {instead} |\n" for module, instead in MODULES.items())
    text += "\n## Names\n\n| module | names | instead |\n|---|---|---|\n"
    for module, names, instead in NAMES:
        text += f"| `{module}` | {', '.join(f'`{name}`' for name in names.split())} | {instead} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
