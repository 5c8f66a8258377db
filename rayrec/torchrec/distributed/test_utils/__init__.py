"""`torchrec.distributed.test_utils`."""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
