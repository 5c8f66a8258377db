"""Base classes of config models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen pydantic model that refuses unknown fields and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class Section(Strict):
    """A section of the train config. A text below a field is its description; infinite numbers are refused."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)
