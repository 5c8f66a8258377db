"""`torchrec.fx`: symbolic tracing of models that hold collections."""

from rayrec.torchrec.fx.tracer import Tracer, symbolic_trace
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["Tracer", "symbolic_trace"]
