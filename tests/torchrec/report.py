"""For each line of the table: the calls that were made on both packages, and whether the answers agree.

`python -m tests.torchrec.report` reads what TorchRec answered from `recorded/`, and asks rayrec. `record.py` and
`losses.py` make the recordings. A line counts where it has calls and none of them differs
without a reason; `rayrec/torchrec/README.md` has the reasons.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from dataclasses import dataclass

from tests.torchrec.case import HERE, SECTIONS, cases, lines, recorded
from tests.torchrec.package import difference

NAMED = ("0", "1", "2", "3", "4", "5", "6", "7", "8")  # the sections that are asked for; 9 and 10 are lists beside


@dataclass(frozen=True)
class Call:
    """A case and what came of it: same, meant (with the reason), absent (not offered), or differs (with the place)."""

    name: str
    verdict: str
    text: str


def calls() -> dict[str, list[Call]]:
    """By line."""
    out: dict[str, list[Call]] = defaultdict(list)
    for section in SECTIONS:
        if not (HERE / f"cases_{section}.py").exists():
            continue
        importlib.import_module(f"tests.torchrec.cases_{section}")
        theirs = recorded(section)
        for case in cases(section):
            found = difference(case.result("rayrec.torchrec"), theirs[case.name])
            verdict = "same" if found is None else "differs" if case.meant is None else "meant"
            if verdict == "meant" and case.meant and case.meant.startswith("not offered"):
                verdict = "absent"
            out[case.line].append(Call(case.name, verdict, case.meant or found or ""))
    return out


def main() -> int:
    table, made = lines(), calls()
    wrong = 0
    for key, line in table.items():
        star = "★" if line.star else " "
        got = made.get(key, [])
        verdicts = {call.verdict for call in got}
        verdict = next((bad for bad in ("differs", "absent") if bad in verdicts), "agrees") if got else "no call"
        wrong += verdict == "differs"
        print(f"{star} {verdict:8} {key}")
        for call in got:
            print(f"             {call.verdict:7} {call.name}{': ' + call.text if call.verdict != 'same' else ''}")
    print()
    for title, asked in (
        ("★ lines", [line for line in table.values() if line.star]),
        ("lines of the named sections", [x for x in table.values() if x.key.split("/")[0] in NAMED and not x.listed]),
    ):
        good = [x for x in asked if made.get(x.key) and not {"differs", "absent"} & {c.verdict for c in made[x.key]}]
        same = [x for x in good if all(call.verdict == "same" for call in made[x.key])]
        print(
            f"{title}: {len(good)} of {len(asked)} agree ({len(same)} in every call, the others but for what is meant)"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
