"""The columns of the MovieLens data sets, under TorchRec's names. Reading them: `data/movielens/prepare.py`."""

from __future__ import annotations

from rayrec.torchrec.not_offered import without

DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_RATINGS_COLUMNS = DEFAULT_RATINGS_COLUMN_NAMES
DEFAULT_MOVIES_COLUMN_NAMES = ["title", "genres"]

_INSTEAD = "prepare the files once with data/movielens/prepare.py and read them with rayrec.data (see its README)"
__getattr__ = without(__name__, dict.fromkeys(("movielens_20m", "movielens_25m"), _INSTEAD))
