"""Text from files and configs on a terminal: shown, never obeyed."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

from rich.markup import escape
from rich.table import Table

# Control characters but tab and newline, and those that turn the direction of writing: a name or a value with them
# could clear the screen, colour it, or show another text than it is.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with its control characters written out, as `\\x1b`."""
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def plain(text: str) -> str:
    """`text` for a rich console: no control characters, no markup read from it."""
    return escape(visible(text))


def notice(text: str) -> None:
    """A line on stderr, where a pipe or a file of results does not have it."""
    with suppress(Exception):  # stderr may be closed
        print(f"rayrec: {visible(text)}", file=sys.stderr, flush=True)


def table(*heads: str, title: str | None = None) -> Table:
    """A table of which the first column stays on one line.

    Args:
        heads: of the columns; one that ends in `>` is aligned to the right.
    """
    made = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        right = head.endswith(">")
        made.add_column(head.rstrip(">"), justify="right" if right else "left", no_wrap=not place, overflow="fold")
    return made
