"""The section `data` of a train config."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec._runtime.strict import Section, Strict, refusal
from rayrec.data.formats.text_options import TextOptions
from rayrec.data.mapping.rules import duration_s
from rayrec.data.source.dataset import DataSet, TrainingData

_DURATION = r"^[1-9][0-9]* ?(s|min|h|d)$"


class BadRows(Strict):
    """Handling of invalid rows, and of all rows of an unreadable file.

    Args:
        policy: "error" ends the run at the first bad row; "skip" leaves bad rows out.
        limit: Bad rows that a rank may skip in an epoch; one more ends the run.
        samples: Skipped rows that are described, per rank and epoch.
        redact: Keep the values of bad rows out of errors, samples, logs and reports.
    """

    policy: Literal["error", "skip"] = "error"
    limit: int = Field(default=1000, ge=0)
    samples: int = Field(default=20, ge=0)
    redact: bool = False

    @property
    def described(self) -> int:
        """Bad rows to describe; at least the row that ends the run."""
        return max(1, self.samples) if self.policy == "error" else self.samples


class Shuffle(Strict):
    """Shuffling of the rows; each epoch has another random order.

    Args:
        windows: Windows shuffled together (size of the shuffle buffer). The first windows of an epoch are shuffled in
            smaller groups, for a fast start.
        rows: Approximate rows of a window. Small row groups are joined; row groups of at least twice the size are cut.
    """

    windows: int = Field(default=1, ge=1)
    rows: int = Field(default=65_536, ge=1)


class ReadOptions(Strict):
    """How a rank reads its data.

    Args:
        reader: "ray" reads through Ray Data, "local" in a thread of the worker. "auto" uses Ray if it is running and
            likely faster: for remote files, and for local files on nodes with at least three cores per rank. It reads
            the first window in a thread while Ray Data starts. A `label_selector` implies Ray.
        cpus_per_read: CPUs that each Ray read task reserves. Leave that many free on the workers' nodes.
        concurrent_reads: Read tasks in flight per rank.
        prefetch_batches: Batches prepared ahead of training.
        label_selector: Labels of the nodes for read tasks, e.g. `{"ray.io/node-group": "cpu"}`. Default: the rank's own
            node while it has free CPUs.
        retries: Retries of a failed read, with doubling waits, while the storage responds.
        patience_s: Seconds to wait for storage that does not respond before the attempt ends (see
            `trainer.max_failures`). Its rows do not count as bad rows.
        bad_rows: Handling of invalid rows.
        stall_timeout_s: Seconds without any row read after which the run ends with an error. Filtered rows count as
            read.
        text: How text files are read. Options that are not set are detected in the first lines.
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
    text: TextOptions = TextOptions()

    @property
    def longest_wait_s(self) -> float:
        """Longest wait for a batch: a reader may itself be waiting for storage."""
        return self.stall_timeout_s + self.patience_s


class EntityTableConfig(Section):
    """A table of entities, e.g. items or users, whose columns features read by key."""

    path: str
    """Files of the table: a file, folder or glob. It is indexed once per node."""
    key: str
    """Column with the keys: integers or strings, as in the rows. Without `valid_from`, each key is there once."""
    columns: list[str] | None = None
    """The columns that features may read. Default: all."""
    valid_from: str | None = None
    """Column with the time when a version of an entity becomes valid. A row gets the last version that is valid at its
    time."""
    at: str | None = None
    """Column of the rows with their time; needed with `valid_from`."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of integer times, counted from 1970."""

    @model_validator(mode="after")
    def _time_of_both(self) -> Self:
        if (self.valid_from is None) != (self.at is None):
            raise ValueError("give both valid_from (the time of a version) and at (the time of a row), or neither")
        return self


class EventTableConfig(Section):
    """A log of events, e.g. plays, of which a row gets those of its key that are earlier than the row."""

    path: str
    """A store of `rayrec data events`; or files of the log, in any order: a file, folder or glob, which is indexed once
    per node."""
    key: str
    """Column with the keys, e.g. of users: integers or strings, as in the rows."""
    time: str
    """Column with the time of each event."""
    columns: list[str] | None = None
    """The columns that sequences may read. Default: all."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of integer times, counted from 1970."""


class WindowsConfig(Section):
    """Windows of `data.order: time`: either `rows` or `time`."""

    rows: int | None = Field(default=None, ge=1)
    """Rows of a window. The last window has the rest."""
    time: str | None = Field(default=None, pattern=_DURATION)
    """Length of a window, e.g. 1d, 6h, 30min or 90s, counted from 1970 in UTC. Lengths without rows are left out."""
    eval_every: int = Field(default=1, ge=1)
    """Windows between evaluations. The last evaluation of a run is always made."""
    eval_share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the next window's rows that an evaluation reads."""

    @property
    def seconds(self) -> int | None:
        """Seconds of a window of `time`; None for windows of rows."""
        return None if self.time is None else duration_s(self.time)


class JoinConfig(Section):
    """Labels that come late: the rows of `data.train` are a service's feature log without labels."""

    events: str
    """Folder of label events, with the columns `_request`, `_row` and `_time`."""
    window: str = Field(pattern=_DURATION)
    """How long a row waits for events, e.g. 30min."""
    late: Literal["correct", "drop", "reweigh"] = "correct"
    """What happens to a positive after the window: see `rayrec data join`."""
    labels: list[str] = Field(default=["label"], min_length=1)
    """Columns to write."""
    kind: str | None = None
    """Column of the events with the name of the label; needed for several labels."""
    keep: str = Field(default="1d", pattern=_DURATION)
    """How long after a row late positives are used."""
    lateness: str = Field(default="1min", pattern=_DURATION)
    """How much later than newer rows a row or an event may come."""
    idle: str = Field(default="1h", pattern=_DURATION)
    """How far log or events may be behind the other before they are not waited for."""


class FollowConfig(Section):
    """Training on a folder to which files are added."""

    poll: str = Field(default="1s", pattern=_DURATION)
    """Time between two looks for new files; at most a minute."""
    idle: str | None = Field(default=None, pattern=_DURATION)
    """End the run after so long without new files, with a checkpoint. Default: wait for ever."""
    until: datetime | None = Field(default=None, strict=False)
    """End the run when `schema.timestamp` of the rows has passed this time (UTC), with a checkpoint."""
    lateness: str = Field(default="0s", pattern=r"^[0-9]+ ?(s|min|h|d)$")
    """How much older than the newest row a new row may be before it counts as late. Late rows are trained on."""
    files: int = Field(default=256, ge=1)
    """Maximum files taken at a time."""
    rows: int = Field(default=65_536, ge=1)
    """Maximum rows of a topic taken at a time."""
    join: JoinConfig | None = None
    """Join the rows with labels first."""
    backfill: str | None = None
    """Folder with the past of a topic: its Parquet files are trained on first, then the topic."""
    live_from: datetime | None = Field(default=None, strict=False)
    """With `backfill`: time (UTC) from which the topic's rows are read; earlier ones are in `backfill`. Default: after
    the newest row of `backfill`."""

    @field_validator("poll")
    @classmethod
    def _polls_often(cls, value: str) -> str:
        if (duration_s(value) or 0) > 60:
            raise ValueError("look at least every minute: ranks wait for one another meanwhile")
        return value

    @model_validator(mode="after")
    def _live_after_the_past(self) -> Self:
        if self.live_from is not None and self.backfill is None:
            raise ValueError("live_from is the end of backfill: name its folder")
        if self.join is not None and self.backfill is not None:
            raise ValueError("backfill is the past of a topic; join works on folders")
        return self

    @field_validator("until", "live_from")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class DataConfig(Section):
    """Training and evaluation data."""

    train: TrainingData
    """Training rows: a path (Parquet file, folder or glob), a list of paths, or a section. A list of sections is a mix
    of data sets by weight."""
    eval: DataSet | None = None
    """Evaluation rows: a path, a list of paths, or a section; `null`: no evaluation."""
    eval_sets: dict[str, DataSet] = Field(default={})
    """Further evaluation sets by name, e.g. the rows of one country: a section with `path` and `filters`."""
    test: DataSet | None = None
    """Rows for one evaluation at the end, of the checkpoint that `storage.keep_best` selects, else of the last one.
    They do not influence training."""
    entities: dict[str, EntityTableConfig] = Field(default={})
    """Tables by name, e.g. `item: {path: items.parquet, key: item_id}`. A feature reads a column of one with `from:
    item.category` and `by`, the column of the rows with the keys or with lists of keys, e.g. `by: item_id`. For a key
    that the table lacks, `on_null` or `default` of the feature applies."""
    events: dict[str, EventTableConfig] = Field(default={})
    """Logs by name, e.g. `plays: {path: plays/, key: user_id, time: ts}`. A sequence reads one with `from: plays`,
    `last` (its length), `before` (the column of the rows with their time), `by` (the column of the rows with the keys;
    default: the name of `key`) and `where`, e.g. `{action: [like, play]}`. Features read its columns with `from:
    SEQUENCE.COLUMN`."""
    negative_rate: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the training rows with label 0 that is read, drawn again each epoch. Evaluations correct predictions
    for it."""
    shuffle: Shuffle | Literal["none"] = Shuffle()
    """Shuffling of the training rows. `none`: global batches are consecutive rows in file order (by file name, then by
    row), for logs in order of time."""
    order: Literal["time"] | None = None
    """`time`: train in the order of `schema.timestamp`, window by window: the model is evaluated on each window before
    it is trained on it. Sets `shuffle: none`, and `trainer.epochs` to the number of windows minus one. A relaunch
    continues where the last one stopped, with the windows that exist then."""
    windows: WindowsConfig | None = None
    """The windows of `order: time`, e.g. `{time: 1d}` or `{rows: 1000000}`; `eval_every` and `eval_share` also apply to
    `progressive`."""
    progressive: str | list[str] | None = None
    """Partition column of `data.train`, e.g. `day` of `day=2024-01-02`, or a list of columns, the longest time first,
    e.g. `[year, month, day]`. Each epoch trains on one value, in order, and is evaluated on the next one.
    `trainer.epochs` is the number of values minus one. A relaunch continues with the smallest value after the last one
    trained on."""
    follow: FollowConfig | None = None
    """Train on the files of the folder `data.train` as they arrive, in the order of their names, until the run is
    stopped; `true` uses the defaults. Sets `shuffle: none`. A relaunch continues at the row where the last one stopped.
    Files must arrive whole: write them under a hidden name such as `.1.parquet`, and rename them. `data.train` may also
    be a topic, `kafka://HOST:PORT/TOPIC` (needs `rayrec[kafka]`)."""
    read: ReadOptions = Field(default=ReadOptions(), description="Options for reading the files.")

    @model_validator(mode="after")
    def _eval_sets_need_eval(self) -> Self:
        if self.eval_sets and self.eval is None:
            raise ValueError("eval_sets needs eval: set it to the main evaluation rows, by which runs are compared")
        return self

    @model_validator(mode="after")
    def _one_progressive_set(self) -> Self:
        if isinstance(self.progressive, list) and len(set(self.progressive)) < max(1, len(self.progressive)):
            raise ValueError("progressive must name a partition column, or several different ones: [year, month, day]")
        if self.progressive is not None and (self.eval is not None or not isinstance(self.train, DataSet)):
            raise ValueError(
                "progressive needs one data set in train and none in eval: the model is evaluated on each period "
                "before it trains on it"
            )
        return self

    @property
    def windowed(self) -> bool:
        """True if each epoch trains on one period and is evaluated on the next."""
        return self.order is not None or self.progressive is not None

    @property
    def eval_every(self) -> int:
        """Periods between evaluations."""
        return 1 if self.windows is None else self.windows.eval_every

    @model_validator(mode="before")
    @classmethod
    def _time_is_not_shuffled(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and isinstance(raw.get("follow"), bool):
            raw = {**raw, "follow": {} if raw["follow"] else None}
        ordered = isinstance(raw, Mapping) and (raw.get("order") is not None or raw.get("follow") is not None)
        return {**raw, "shuffle": "none"} if ordered and "shuffle" not in raw else raw

    @model_validator(mode="after")
    def _follows_one_folder(self) -> Self:
        if self.follow is None:
            return self
        if self.windowed:
            raise refusal("data.follow", "follows files as they arrive: remove order or progressive")
        train = self.train
        topic = isinstance(train, DataSet) and isinstance(train.path, str) and train.path.startswith("kafka://")
        if not isinstance(train, DataSet) or not isinstance(train.path, str) or train.table:
            raise refusal("data.follow", "follows one folder or topic: name it in data.train")
        if not topic and ("://" in train.path or self.follow.backfill is not None):
            raise refusal("data.follow", "follows a local folder, or kafka://HOST:PORT/TOPIC, with or without backfill")
        if topic and self.follow.join is not None:
            raise refusal("data.follow.join", "joins folders: let a consumer write the topic to one")
        if train.filters:
            raise refusal("data.train.filters", "follow reads all rows: remove the filters")
        if self.shuffle != "none":
            raise refusal("data.shuffle", "follow reads the rows in the order of the files: remove shuffle")
        return self

    @model_validator(mode="after")
    def _windows_of_one_order(self) -> Self:
        windows = self.windows
        if self.order is None:
            if windows is not None and (self.progressive is None or windows.rows or windows.time):
                raise refusal("data.windows", "windows of rows or of time need order: time, and schema.timestamp")
            return self
        if windows is None or (windows.rows is None) == (windows.time is None):
            raise refusal(
                "data.windows", "order: time needs either rows, e.g. {rows: 1000000}, or time, e.g. {time: 1d}"
            )
        if self.progressive is not None:
            raise refusal("data.progressive", "a folder is a window of its own: remove order, or progressive")
        if self.eval is not None or not isinstance(self.train, DataSet):
            raise refusal(
                "data.order", "time needs one data set in train and none in eval: each window is evaluated on first"
            )
        if self.shuffle != "none":
            raise refusal("data.shuffle", "order: time keeps the order of the rows: remove shuffle")
        return self

    @model_validator(mode="after")
    def _mix_has_no_order(self) -> Self:
        if self.shuffle == "none" and not isinstance(self.train, DataSet):
            raise refusal("data.shuffle", "`none` keeps the order of one data set; a mix of several has none")
        if self.negative_rate < 1 and not isinstance(self.train, DataSet):
            raise refusal("data.negative_rate", "works with one data set; set it to 1 for a mix of several")
        return self
