"""`torchrec.models`: DLRM and DeepFM, built from TorchRec's submodules."""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
