"""`python -m rayrec.torchrec train.py …` runs a script that imports `torchrec` on rayrec; `--check` analyzes it."""

from __future__ import annotations

import sys
from typing import NoReturn

from rayrec.torchrec.script import run

USAGE = """usage: python -m rayrec.torchrec SCRIPT [ARGUMENT ...]
       python -m rayrec.torchrec --check SCRIPT [SCRIPT ...]

Runs SCRIPT with `import torchrec` meaning rayrec.torchrec. With --check, analyzes SCRIPT without running it and lists
the names of torchrec it uses that are missing or work differently, with line numbers and alternatives; the exit status
is 1 if a name is missing."""


def main() -> None:
    if sys.argv[1:2] == ["--check"] and len(sys.argv) > 2:
        sys.exit(_check(sys.argv[2:]))
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        wants_help = sys.argv[1:2] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if wants_help else sys.stderr)
        sys.exit(0 if wants_help else 2)
    del sys.argv[0]
    try:
        open(sys.argv[0], "rb").close()
    except OSError as error:
        _cannot_read(sys.argv[0], error)
    run(sys.argv[0])


def _check(paths: list[str]) -> int:
    """Prints the findings in each program; returns 1 if a name is missing."""
    from rayrec.torchrec.check import check, report

    missing = False
    for path in paths:
        try:
            checked = check(path)
        except (OSError, SyntaxError) as error:
            _cannot_read(path, error)
        print(report(path, checked))
        missing |= any(item.missing for item in checked.findings)
    return int(missing)


def _cannot_read(path: str, error: OSError | SyntaxError) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else f"line {error.lineno}: {error.msg}"
    print(f"python -m rayrec.torchrec: can't open {path!r}: {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
