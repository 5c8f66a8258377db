"""Records what TorchRec 1.8 answers to every case: `python -m tests.torchrec.record [section …]`.

TorchRec must be importable, and rayrec need not be: `pip install --no-deps --target FOLDER torchrec==1.8.0 tensordict
pyvers iopath pyre-extensions torchmetrics==1.0.3 …`, with FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys

from tests.torchrec.case import HERE, SECTIONS, cases


def main() -> None:
    for section in sys.argv[1:] or SECTIONS:
        answers = {case.name: case.result("torchrec") for case in cases(section)}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in sorted(answers.items()))
        (HERE / "recorded" / f"{section}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
        print(f"{section}: {len(answers)} answers")


if __name__ == "__main__":
    main()
