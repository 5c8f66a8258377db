"""The columns of the Criteo click logs."""

from __future__ import annotations

from collections.abc import Callable

from rayrec.torchrec.datasets.utils import safe_cast

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{index}" for index in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{index}" for index in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
TOTAL_TRAINING_SAMPLES = 4195197692
FREQUENCY_THRESHOLD = 3


def _number(text: str) -> int:
    return safe_cast(text, int, 0)


COLUMN_TYPE_CASTERS: list[Callable[[str], int | str]] = [
    *[_number] * (1 + INT_FEATURE_COUNT),  # an empty cell is 0
    *[str] * CAT_FEATURE_COUNT,
]
