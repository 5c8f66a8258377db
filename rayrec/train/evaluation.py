"""One pass over the evaluation rows: each exactly once, by however many ranks."""

from __future__ import annotations

from typing import Any

from rayrec.data import BatchStream, Cursor, Manifest, empty_batch
from rayrec.metrics import BinaryMetrics
from rayrec.train import build
from rayrec.train.config import TrainConfig
from rayrec.train.control import dealt, in_step
from rayrec.train.learner import Learner
from rayrec.train.session import Session


def evaluate(learner: Learner, manifest: Manifest, config: TrainConfig, session: Session) -> dict[str, Any]:
    """AUC, NE, logloss, calibration and the number of samples; a collective.

    Raises:
        RankError: rows that cannot be read, on any rank.
    """
    metrics = BinaryMetrics(session.device)
    model = learner.model
    training = model.training
    model.eval()
    stream = session.control.together(lambda: open_stream(manifest, config, session, Cursor.start(0), shuffle=False))
    try:
        with stream:
            for turn in in_step(stream, empty_batch(config.data_schema), session.control):
                batch = turn.batch.to(session.device, non_blocking=True)
                metrics.update(learner.score(batch), batch.label)
    finally:
        model.train(training)
    return metrics.compute(session.group)


def open_stream(
    manifest: Manifest, config: TrainConfig, session: Session, cursor: Cursor, *, shuffle: bool
) -> BatchStream:
    """This rank's share of the rows that the cursor leaves of its epoch."""
    return BatchStream(
        manifest,
        config.data_schema,
        build.rows_of(config),
        batch_rows=dealt(config.trainer.batch_size, session.rank, session.world_size),
        rank=session.rank,
        world_size=session.world_size,
        cursor=cursor,
        seed=config.trainer.seed,
        shuffle=shuffle,
        options=config.data.read,
    )
