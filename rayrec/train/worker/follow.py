"""Training on data that grows: rank 0 looks for new files, and all ranks train on the same chunks of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.data import DataSet
from rayrec.data.live.following import JOINED, LANDED, LEDGER, Chunk, Follower, shown
from rayrec.storage.folder import open_folder
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.worker.lockstep import Load
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.session import Job, Session


def follower_of(config: TrainConfig, checkpoints: str, folder: Path, tell: Callable[[str], object]) -> Follower:
    """The follower of a run; its ledger is beside the checkpoints.

    Args:
        checkpoints: path or URI of the folder of checkpoints.
        folder: run folder.
        tell: called with each problem that new rows wait for.
    """
    data = config.data
    assert data.follow is not None and isinstance(data.train, DataSet), "checked with the config"
    ledger = open_folder(checkpoints).parent().sub(LEDGER)
    schema, timestamp = config.training_schema, config.data_schema.timestamp

    def needed_from() -> int:
        try:
            return min(map(chunk_of, CheckpointStore(checkpoints).all()), default=0)
        except OSError:  # unknown now
            return 0

    return Follower(
        data.train, data.follow, schema, timestamp, ledger, folder / JOINED, folder / LANDED, tell,
        needed_from=needed_from,
    )  # fmt: skip


def chunk_of(checkpoint: Checkpoint | None) -> int:
    """The chunk at which a run continues from a checkpoint; without one, at the first."""
    position = START if checkpoint is None else Position.from_dict(checkpoint.extra["position"])
    return position.epoch + position.cursor.over


class Following:
    """One rank's view of the chunks. Methods are collectives unless documented otherwise.

    Args:
        tell: called on rank 0 with each problem that new rows wait for.

    Attributes:
        ended: why the run ends, once it does.
    """

    def __init__(self, job: Job, session: Session, tell: Callable[[str], object]) -> None:
        self._control, self._leads = session.control, session.rank == 0
        self._follower: Follower | None = None
        self._open = lambda: follower_of(job.config, job.checkpoints, job.folder, tell)
        self._chunk: Chunk | None = None
        self._late_rows = 0
        self.ended: str | None = None

    def take(self, number: int, while_waiting: Callable[[Load], bool]) -> Chunk | None:
        """A chunk, after waiting for its files; None if the run ends.

        Args:
            while_waiting: called between two looks with the totals over ranks; False: wait no longer.
        """
        while True:
            found = self._control.gather(self._control.together(lambda: self._look(number)))[0]
            if isinstance(found, str):
                self.ended = found
                return None
            if found is not None:
                self._chunk, self._late_rows = found, self._late_rows + found.late_rows
                return found
            if not while_waiting(self._control.load(0, 0.0)):
                return None
            # Other ranks wait for this one in the next exchange.
            self._control.together(self._sleep)

    def values(self) -> dict[str, Any]:
        """Values of a logging line. Not a collective."""
        if self._chunk is None or self._chunk.watermark_us is None:
            return {}
        return {"watermark": shown(self._chunk.watermark_us), "late_rows": self._late_rows}

    def close(self) -> None:
        """Lets another process follow. Not a collective."""
        if self._follower is not None:
            self._follower.close()

    def _look(self, number: int) -> Chunk | str | None:
        if not self._leads:
            return None
        if self._follower is None:
            self._follower = self._open()
        return self._follower.next(number)

    def _sleep(self) -> None:
        if self._follower is not None:
            self._follower.sleep()
