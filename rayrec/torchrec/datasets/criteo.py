"""The columns of the Criteo data sets, under TorchRec's names. Reading them: `data/criteo/prepare.py`."""

from __future__ import annotations

from rayrec.torchrec.not_offered import without

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{place}" for place in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{place}" for place in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
TOTAL_TRAINING_SAMPLES = 4195197692
FREQUENCY_THRESHOLD = 3

_INSTEAD = "prepare the files once with data/criteo/prepare.py and read them with rayrec.data (see its README)"
_READERS = ("BinaryCriteoUtils", "InMemoryBinaryCriteoIterDataPipe", "criteo_kaggle", "criteo_terabyte")
__getattr__ = without(__name__, dict.fromkeys(_READERS, _INSTEAD))
