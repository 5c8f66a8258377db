"""One pass over the evaluation rows: each exactly once, by however many ranks."""

from __future__ import annotations

from typing import Any

from rayrec.data import BatchStream, empty_batch
from rayrec.metrics import BinaryMetrics
from rayrec.train.config import TrainConfig
from rayrec.train.control import in_step
from rayrec.train.learner import Learner
from rayrec.train.session import Session


def evaluate(learner: Learner, stream: BatchStream, config: TrainConfig, session: Session) -> dict[str, Any]:
    """What `BinaryMetrics` measures, over the rows of all ranks; a collective.

    Raises:
        RankError: rows that cannot be read, on any rank.
    """
    metrics = BinaryMetrics(session.device, names=config.data_schema.task_names)
    model = learner.model
    training = model.training
    model.eval()
    try:
        with stream:
            for turn in in_step(stream, empty_batch(config.data_schema), session.control):
                batch = turn.on(session.device).batch
                metrics.update(learner.score(batch), batch.label, batch.weight)
    finally:
        model.train(training)
    return metrics.compute(session.group)
