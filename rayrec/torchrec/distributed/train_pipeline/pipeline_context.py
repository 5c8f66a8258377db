"""`torchrec.distributed.train_pipeline.pipeline_context`."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


@dataclass
class TrainPipelineContext:
    """The only supported `context_type`. Pipelines keep the state of a batch themselves and do not create contexts.

    Args:
        index: number of the batch.
        version: version of the layout.
    """

    index: int | None = None
    version: int = 0


def check_context(context_type: type | None) -> None:
    """Raises ValueError for a custom context type, as nothing would call its methods."""
    if context_type not in (None, TrainPipelineContext):
        raise ValueError(
            f"context_type={getattr(context_type, '__name__', context_type)}: custom contexts are not supported; leave "
            "it out, and do the work of each batch in custom_model_fwd or in the progress method of a subclass"
        )
