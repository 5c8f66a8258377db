"""The data streams of a run, and counts of the rows that they skip.

Streams can be opened ahead of time, to hide the latency of the first rows of an epoch.
"""

from __future__ import annotations

from typing import Any

from rayrec.data import BatchStream, Cursor, Manifest, Mix, MixedStream, Shuffle
from rayrec.data.order.epoch import dealt
from rayrec.data.stream.shared_manifest import SharedManifest
from rayrec.train.setup import build
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.session import Job, Session

# "train", "popular" (training rows, to count items), "eval", or a name in the job's `sets`.
Use = str
Stream = BatchStream | MixedStream


class Streams:
    """This rank's streams of training and evaluation rows, by use and epoch."""

    def __init__(self, job: Job, session: Session) -> None:
        self._job, self._session = job, session
        self._ready: dict[tuple[Use, int], Stream | Exception] = {}
        self.train: Manifest | SharedManifest | Mix = job.train  # with `data.follow`, the rows of the current epoch

    def prepare(self, use: Use, cursor: Cursor) -> None:
        """Open a stream for a later `take`. If this fails, `take` raises the error."""
        key = (use, cursor.epoch)
        if key not in self._ready:
            try:
                self._ready[key] = self._open(use, cursor)
            except Exception as error:
                self._ready[key] = error

    def take(self, use: Use, cursor: Cursor) -> Stream:
        """The stream of the remaining rows of the cursor's epoch; close it after use. A collective.

        Raises:
            RankError: on every rank, if the stream cannot be opened on some rank.
        """
        self.prepare(use, cursor)
        stream = self._ready.pop((use, cursor.epoch))
        return self._session.control.together(lambda: _raise_error(stream))

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the streams that were not taken."""
        for stream in self._ready.values():
            if not isinstance(stream, Exception):
                stream.close()
        self._ready.clear()

    def _open(self, use: Use, cursor: Cursor) -> Stream:
        job = self._job
        manifest = self.train if use in ("train", "popular") else job.eval if use == "eval" else job.sets[use]
        assert manifest is not None
        if isinstance(manifest, Mix):
            return self._open_mix(manifest, cursor)
        return self._open_one(manifest, use, cursor)

    def _open_one(self, manifest: Manifest | SharedManifest, use: Use, cursor: Cursor) -> BatchStream:
        config, session = self._job.config, self._session
        for_training = use in ("train", "popular")
        shuffle = config.data.shuffle if for_training else None
        return BatchStream(
            manifest,
            config.training_schema if for_training else config.evaluation_schema,
            build.rows_of(config),
            batch_rows=dealt(config.trainer.batch_size, session.rank, session.world_size),
            rank=session.rank,
            world_size=session.world_size,
            cursor=cursor,
            seed=config.trainer.seed,
            shuffle=isinstance(shuffle, Shuffle),
            interleave=shuffle.windows if isinstance(shuffle, Shuffle) else 1,
            in_steps_of=config.trainer.batch_size if shuffle == "none" else None,
            options=config.data.read,
            negative_rate=config.data.negative_rate if use == "train" else 1.0,
        )

    def _open_mix(self, mix: Mix, cursor: Cursor) -> MixedStream:
        config, session = self._job.config, self._session
        shuffle = config.data.shuffle
        return MixedStream(
            mix,
            config.training_schema,
            build.rows_of(config),
            batch_rows=config.trainer.batch_size,
            rank=session.rank,
            world_size=session.world_size,
            cursor=cursor,
            seed=config.trainer.seed,
            interleave=shuffle.windows if isinstance(shuffle, Shuffle) else 1,
            options=config.data.read,
        )


def _raise_error(stream: Stream | Exception) -> Stream:
    if isinstance(stream, Exception):
        raise stream
    return stream


class SkippedRows:
    """Counts the rows that a stream skips, for reports at checkpoints and at its end.

    A stream reads ahead, so a report may include rows from a few batches after the checkpoint.

    Args:
        purpose: use of the rows: "training" or "evaluation".
    """

    def __init__(self, stream: BatchStream | MixedStream, control: Control, purpose: str) -> None:
        self._stream, self._control, self._purpose = stream, control, purpose
        self._reported = self._reported_samples = 0

    def event(self, epoch: int) -> dict[str, Any] | None:
        """An event about the rows that all ranks skipped since the last event. A collective.

        Returns:
            `count` of the rows, and `samples` of them with file and row; None if no rows were skipped.
        """
        skipped = self._stream.skipped
        count, samples = skipped.count - self._reported, skipped.samples[self._reported_samples :]
        self._reported, self._reported_samples = self._reported + count, self._reported_samples + len(samples)
        ranks = self._control.gather((count, [sample.to_dict() for sample in samples]))
        count = sum(rank_count for rank_count, _ in ranks)
        if not count:
            return None
        rows = f"{count:,} {self._purpose} row{'' if count == 1 else 's'}"
        message = f"{rows} could not be used and {'was' if count == 1 else 'were'} skipped in epoch {epoch + 1}"
        return {
            "event": "skipped",
            "message": message,
            "count": count,
            "samples": [sample for _, samples in ranks for sample in samples],
        }
