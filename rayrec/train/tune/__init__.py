"""Hyperparameter search on Ray Tune: `space.py` parses the search space, `search.py` runs the trials."""

from __future__ import annotations

from rayrec.train.tune.search import Search, Trial, folder_of, tune

__all__ = ["Search", "Trial", "folder_of", "tune"]
