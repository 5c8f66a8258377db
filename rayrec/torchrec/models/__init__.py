"""TorchRec's `models`: DLRM and DeepFM in parts, dense and sparse features in, logits or probabilities out."""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
