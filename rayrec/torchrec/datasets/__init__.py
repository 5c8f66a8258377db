"""`torchrec.datasets`: random batches, and readers of the files of Criteo and MovieLens, for existing scripts.

For new code, use `rayrec.data`, which reads Parquet on Ray.
"""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
