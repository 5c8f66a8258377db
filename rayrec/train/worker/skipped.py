"""Reports rows that could not be used and were skipped."""

from __future__ import annotations

from typing import Any

from rayrec.data import BatchStream, MixedStream
from rayrec.train.worker.lockstep import Control


class SkippedRows:
    """The rows that one stream skips, reported at checkpoints and at its end.

    A stream reads ahead, so reported rows may lie a few batches beyond the checkpoint.

    Args:
        what: whose rows they are, "training" or "evaluation".
    """

    def __init__(self, stream: BatchStream | MixedStream, control: Control, what: str) -> None:
        self._stream, self._control, self._what = stream, control, what
        self._reported = self._reported_samples = 0

    def event(self, epoch: int) -> dict[str, Any] | None:
        """An event with the rows of all ranks since the last one: `count`, and `samples` with their places. None where
        there are none. A collective.
        """
        found = self._stream.skipped
        count, samples = found.count - self._reported, found.samples[self._reported_samples :]
        self._reported, self._reported_samples = self._reported + count, self._reported_samples + len(samples)
        ranks = self._control.gather((count, [sample.to_dict() for sample in samples]))
        count = sum(counted for counted, _ in ranks)
        if not count:
            return None
        rows = f"{count:,} {self._what} row{'' if count == 1 else 's'}"
        message = f"{rows} could not be used and {'was' if count == 1 else 'were'} left out in epoch {epoch + 1}"
        return {
            "event": "skipped",
            "message": message,
            "count": count,
            "samples": [s for _, some in ranks for s in some],
        }
