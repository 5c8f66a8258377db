"""What all sections of the config have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from rayrec.data.strict import Strict


class Section(Strict):
    """A part of the config: unknown fields are refused, types are not coerced, values do not change.

    A field's description is a text below it, or stands in its `Field` where it is short.
    """

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)


def listed_meaning(owners: Sequence[Any], name: str) -> str:
    """What the first docstring that lists an argument under `Args:` says of it; empty where none does."""
    for owner in owners:
        _, _, listed = (owner.__doc__ or "").partition("Args:\n")
        found = re.search(rf"^\s+{name}: (.*(?:\n {{12,}}\S.*)*)", listed, re.MULTILINE)
        if found:
            return " ".join(found.group(1).split()).removesuffix(".")
    return ""
