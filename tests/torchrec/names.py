"""The table of names: `python -m tests.torchrec.names` writes `rayrec/torchrec/NAMES.md` from the cases."""

from __future__ import annotations

from pathlib import Path

from tests.torchrec.case import HERE, SECTIONS, cases, lines

PAGE = Path(__file__).resolve().parents[2] / "rayrec" / "torchrec" / "NAMES.md"
CHAPTERS = {
    "0": "Import paths",
    "1": "sparse",
    "2": "modules",
    "3": "models",
    "4": "optim",
    "5": "distributed: types",
    "6": "distributed: sharding a model",
    "7": "distributed.planner",
    "8": "distributed.train_pipeline",
    "9": "metrics",
    "10": "datasets, inference, quant",
    "11": "fx, test_utils",
}
HEAD = """# TorchRec's names in rayrec

What was compared by calls on both, a line for each name or group of names that stand together. "same": every call gave
the same. A sentence says what is meant to differ, what is stricter, or that it is not offered and what to use. Written
by `python -m tests.torchrec.names` from the calls that `python -m tests.torchrec.report` lists.
[Why, and how to move](README.md).
"""


def verdicts() -> dict[str, str]:
    """Of each line, by key."""
    found: dict[str, list[str | None]] = {key: [] for key in lines()}
    for section in SECTIONS:
        if (HERE / f"cases_{section}.py").exists():
            for case in cases(section):
                found[case.line].append(case.meant)
    return {key: _verdict(meant) for key, meant in found.items()}


def _verdict(meant: list[str | None]) -> str:
    if not meant:
        return "not compared"
    reasons = dict.fromkeys(reason for reason in meant if reason)
    return "; ".join(reasons) if reasons else "same"


def page() -> str:
    table, of = lines(), verdicts()
    text = HEAD
    for number, title in CHAPTERS.items():
        text += f"\n## {title}\n\n| name | rayrec |\n|---|---|\n"
        for key, line in table.items():
            if key.split("/")[0] == number:
                star = " ★" if line.star else ""
                text += f"| `{line.names.replace('`', '').replace('|', '/')}`{star} | {of[key]} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
