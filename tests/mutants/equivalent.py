"""Faults that change nothing a test could see, by file and change, each with the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "rayrec/checkpoint/polling.py",
        "`raise _worst(failures) from (errors[0] if errors else None)` → "
        "`raise _worst(failures) from (errors[ -1] if errors else None)`",
    ): "a rank's list of errors has at most one",
}
