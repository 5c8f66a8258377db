"""Faults that change nothing a test could see, by file and change, each with the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {}
