"""Base classes of config models, and the error of a check that names a field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """A frozen pydantic model that refuses unknown fields and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class Section(Strict):
    """A section of the train config. A text below a field is its description; infinite numbers are refused."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)


def refusal(path: str, message: str) -> PydanticCustomError:
    """The error of a validator for the field at `path` of the train config, e.g. `trainer.batch_size`."""
    # Pydantic formats braces in a template, so the message is passed as a value.
    return PydanticCustomError("config", "{message}", {"message": message, "path": path})
