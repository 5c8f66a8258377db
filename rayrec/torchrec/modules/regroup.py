"""`torchrec.modules.regroup`."""

from rayrec.modules.regroup import KTRegroupAsDict
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["KTRegroupAsDict"]
