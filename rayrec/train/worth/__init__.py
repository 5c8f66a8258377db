"""`rayrec worth`: variants of a model trained side by side on one pass over a log, and their paired differences."""

from rayrec.train.worth.compare import compare
from rayrec.train.worth.variants import Variant, variants_of

__all__ = ["Variant", "compare", "variants_of"]
