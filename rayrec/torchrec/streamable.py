"""`torchrec.streamable`."""

from rayrec.streamable import Multistreamable, Pipelineable

__all__ = ["Multistreamable", "Pipelineable"]
