"""What all sections of the config have in common."""

from __future__ import annotations

from pydantic import ConfigDict

from rayrec.data.strict import Strict


class Section(Strict):
    """A part of the config: unknown fields are refused, types are not coerced, values do not change.

    A field's description is a text below it, or stands in its `Field` where it is short.
    """

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)
