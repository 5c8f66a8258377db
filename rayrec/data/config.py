"""How data is read, as opposed to what it means: the `data.read` part of a train config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrec.data.strict import Strict


class BadRows(Strict):
    """What happens to a row that cannot be used, and to the rows of a file that cannot be read.

    Args:
        policy: "error" ends the run with the first one, "skip" goes on without them.
        limit: a rank that skipped more rows than this in one epoch ends the run.
        samples: how many of a rank's skipped rows are described, for each epoch; 0 describes none.
        redact: leave the values of bad rows out of errors, samples, logs and reports.
    """

    policy: Literal["error", "skip"] = "error"
    limit: int = Field(default=1000, ge=0)
    samples: int = Field(default=20, ge=0)
    redact: bool = False

    @property
    def described(self) -> int:
        """How many bad rows need a description: the one that ends the run does in any case."""
        return max(1, self.samples) if self.policy == "error" else self.samples


class Shuffle(Strict):
    """How strongly the rows of an epoch are mixed: their order is drawn anew for each.

    Args:
        windows: that many windows, from anywhere in the data, are in memory at a time, and every batch has its share of
            the rows of each; of an epoch's first windows fewer come mixed, so that rows come soon.
        rows: of a window, about: row groups are joined to so many, and cut where they have twice as many or more.
    """

    windows: int = Field(default=1, ge=1)
    rows: int = Field(default=65_536, ge=1)


class ReadOptions(Strict):
    """How a rank reads its part of the data.

    Args:
        reader: "ray" reads through Ray Data, "local" in a thread of this process; "auto" takes Ray where it runs and
            can be faster: for files that are not on a disk, and where the node has three cores or more for each rank on
            it; the first window of a stream is read in a thread while Ray Data starts. With a `label_selector`, Ray.
        cpus_per_read: CPUs that a Ray read task reserves; leave that much free beside the workers. 0: none.
        concurrent_reads: read tasks in flight per rank.
        prefetch_batches: batches made ahead of the one that is trained on.
        label_selector: labels of the nodes that reads run on, as `{"ray.io/node-group": "cpu"}`; without, each rank's
            run on its own node while that has CPUs to spare.
        retries: how often a read that failed while its storage answers is tried again, after waits that double.
        patience_s: how long storage that does not answer is waited for before the attempt ends (`trainer.max_failures`
            says how many there are); its rows do not count as bad ones.
        bad_rows: what happens to rows that cannot be used.
        stall_timeout_s: when nothing has been read for so long, the run ends with an error instead of waiting forever;
            rows that filters leave out count as read.
    """

    reader: Literal["auto", "ray", "local"] = "auto"
    cpus_per_read: float = Field(default=0.25, ge=0)
    concurrent_reads: int = Field(default=2, ge=1)
    prefetch_batches: int = Field(default=4, ge=1)
    label_selector: dict[str, str] | None = None
    retries: int = Field(default=3, ge=0)
    patience_s: float = Field(default=60.0, ge=0)
    bad_rows: BadRows = BadRows()
    stall_timeout_s: float = Field(default=120.0, gt=0)

    @property
    def longest_wait_s(self) -> float:
        """How long to wait for rows: a reader may be waiting for its storage."""
        return self.stall_timeout_s + self.patience_s
