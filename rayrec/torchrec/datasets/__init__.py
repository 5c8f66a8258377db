"""Data sets under TorchRec's names, for scripts that come from there: drawn batches, and readers of Criteo's and
MovieLens's files.

rayrec's own way to data is `rayrec.data`: Parquet in, batches out, on Ray.
"""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
