"""`python -m rayrec.torchrec train.py …` runs a script that imports `torchrec` on rayrec."""

from __future__ import annotations

import sys

from rayrec.torchrec.script import run

USAGE = """usage: python -m rayrec.torchrec SCRIPT [ARGUMENT ...]

Runs SCRIPT with `import torchrec` meaning rayrec.torchrec."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        wants_help = sys.argv[1:2] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if wants_help else sys.stderr)
        sys.exit(0 if wants_help else 2)
    del sys.argv[0]
    try:
        open(sys.argv[0], "rb").close()
    except OSError as error:
        print(f"python -m rayrec.torchrec: can't open {sys.argv[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    run(sys.argv[0])


if __name__ == "__main__":
    main()
