"""`torchrec.streamable`."""

from rayrec._runtime.streamable import Multistreamable, Pipelineable

__all__ = ["Multistreamable", "Pipelineable"]
