"""`torchrec.distributed.train_pipeline.pipeline_context`."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


@dataclass
class TrainPipelineContext:
    """The type that `context_type` names. Pipelines keep a batch's state inside themselves and make no contexts.

    Args:
        index: the batch's number.
        version: of the layout.
    """

    index: int | None = None
    version: int = 0


def check_context(context_type: type | None) -> None:
    """Raises ValueError for a context of the user's own, whose methods nothing would call."""
    if context_type not in (None, TrainPipelineContext):
        raise ValueError(
            f"context_type={getattr(context_type, '__name__', context_type)}: pipelines make no contexts of a type of "
            "yours; leave it out, and do per-batch work in custom_model_fwd or in a subclass's progress"
        )
