"""`torchrec.modules.regroup`."""

from rayrec.modules.regroup import KTRegroupAsDict

__all__ = ["KTRegroupAsDict"]
