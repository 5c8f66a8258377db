"""`torchrec.version`."""

from rayrec.torchrec import __version__

__all__ = ["__version__"]
