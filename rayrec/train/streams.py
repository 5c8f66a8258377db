"""The streams of a run, opened shortly before they are needed: the first rows of an epoch take Ray a moment to find."""

from __future__ import annotations

from typing import Literal

from rayrec.data import BatchStream, Cursor
from rayrec.train import build
from rayrec.train.control import dealt
from rayrec.train.session import Job, Session

Use = Literal["train", "eval"]


class Streams:
    """This rank's streams of training and evaluation rows, by what they are for and their epoch."""

    def __init__(self, job: Job, session: Session) -> None:
        self._job, self._session = job, session
        self._ready: dict[tuple[Use, int], BatchStream | Exception] = {}

    def prepare(self, use: Use, cursor: Cursor) -> None:
        """Start reading now what `take` will be asked for; what goes wrong is told then."""
        key = (use, cursor.epoch)
        if key not in self._ready:
            try:
                self._ready[key] = self._open(use, cursor)
            except Exception as error:
                self._ready[key] = error

    def take(self, use: Use, cursor: Cursor) -> BatchStream:
        """The stream of what the cursor leaves of its epoch; close it after use. A collective.

        Raises:
            RankError: on every rank, if it cannot be opened on any.
        """
        self.prepare(use, cursor)
        found = self._ready.pop((use, cursor.epoch))
        return self._session.control.together(lambda: _opened(found))

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the streams that nobody took."""
        for stream in self._ready.values():
            if isinstance(stream, BatchStream):
                stream.close()
        self._ready.clear()

    def _open(self, use: Use, cursor: Cursor) -> BatchStream:
        config, session = self._job.config, self._session
        manifest = self._job.train if use == "train" else self._job.eval
        assert manifest is not None
        return BatchStream(
            manifest,
            config.data_schema.for_training if use == "train" else config.data_schema,
            build.rows_of(config),
            batch_rows=dealt(config.trainer.batch_size, session.rank, session.world_size),
            rank=session.rank,
            world_size=session.world_size,
            cursor=cursor,
            seed=config.trainer.seed,
            shuffle=use == "train",
            options=config.data.read,
            negative_rate=config.data.negative_rate if use == "train" else 1.0,
        )


def _opened(found: BatchStream | Exception) -> BatchStream:
    if isinstance(found, Exception):
        raise found
    return found
