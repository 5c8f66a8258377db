"""Training on a Kafka topic: every message once, at offsets of our own, after the past in Parquet files.

The brokers are librdkafka's mock cluster, in this process. It does not look up offsets by time, and has no retention,
transactions, security or rebalancing of partitions between brokers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from rayrec.data import DataError, DataUnavailable, Follower, KafkaTopic
from rayrec.train import parse_config
from tests.ranks import RankError, on_ranks
from tests.train import small
from tests.train.row_log import noted, train_noted
from tests.train.small import make_job
from tests.train.test_exactly_once import committed
from tests.train.test_follow import config, fit, follower, records, rows_of, write

kafka = pytest.importorskip("confluent_kafka")
PARTITIONS = 3


class Broker:
    """A mock cluster, and a producer of rows that are numbered through, one a second."""

    def __init__(self) -> None:
        self.producer = kafka.Producer({"test.mock.num.brokers": 2, "log_level": 2})
        brokers = self.producer.list_topics(timeout=20).brokers.values()
        self.address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def uri(self, topic: str, form: str = "json") -> str:
        return f"kafka://{self.address}/{topic}?format={form}"

    def rows(self, first: int, stop: int) -> pa.Table:
        part = small.table(2000, seed=0).slice(first, stop - first)
        return part.append_column("when", pa.array(np.arange(first, stop), pa.timestamp("s")))

    def send(self, topic: str, first: int, stop: int, form: str = "json") -> None:
        """JSON: a message a row, in turns to all partitions; Arrow: a message of all rows."""
        rows = self.rows(first, stop)
        if form == "arrow":
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_table(rows)
            self.producer.produce(topic, sink.getvalue().to_pybytes(), partition=0)
        else:
            for number, row in enumerate(rows.to_pylist(), first):
                value = json.dumps({**row, "when": row["when"].isoformat()}, indent=1)
                self.producer.produce(
                    topic, value.encode(), partition=number % PARTITIONS, timestamp=1000 * (number + 1)
                )
        assert self.producer.flush(20) == 0

    def put(self, topic: str, row: dict[str, Any], partition: int) -> None:
        """One message, as JSON."""
        row = {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()}
        self.producer.produce(topic, json.dumps(row).encode(), partition=partition)
        assert self.producer.flush(20) == 0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    yield Broker()


def topic_config(folder: Path, uri: str, **follow: Any) -> dict[str, Any]:
    raw = config(folder, **follow)
    raw["data"]["train"] = uri
    return raw


def test_the_past_then_the_topic_each_row_once_over_launches(tmp_path: Path, broker: Broker) -> None:
    write(tmp_path / "past", [0, 1])  # rows 0 to 79
    broker.send("clicks", 60, 130)  # what it shares with the past is older than its newest row
    raw = topic_config(tmp_path, broker.uri("clicks"), backfill=str(tmp_path / "past"), rows=30)
    assert fit(raw, tmp_path / "first").ended == "no new messages for 1s (data.follow.idle)"
    first = rows_of(tmp_path / "first")
    assert first[:80] == list(range(80)) and sorted(first) == list(range(130))
    *_, last = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert last["watermark"] == "1970-01-01 00:02:07"  # of the partition that is behind: rows 127, 128 and 129

    # Rows are fetched again if their file is gone. No group has committed anything.
    landed = tmp_path / "runs/small/landed"
    for path in landed.iterdir():
        path.unlink()
    broker.send("clicks", 130, 150)
    fit(raw, tmp_path / "second")
    assert sorted(rows_of(tmp_path / "second")) == list(range(130, 150))
    entry = json.loads(sorted((tmp_path / "runs/small/followed").iterdir())[-1].read_text())
    assert sum(entry["offsets"].values()) == 90
    asked = kafka.Consumer({"bootstrap.servers": broker.address, "group.id": "rayrec"})
    (place,) = asked.committed([kafka.TopicPartition("clicks", 0)], 20)
    assert place.offset == kafka.OFFSET_INVALID
    asked.close()


def test_arrow_messages_hold_many_rows_and_a_bad_message_is_named(tmp_path: Path, broker: Broker) -> None:
    broker.send("arrow", 0, 50, "arrow")
    raw = topic_config(tmp_path, broker.uri("arrow", "arrow"))
    fit(raw, tmp_path / "first")
    assert rows_of(tmp_path / "first") == list(range(50))
    broker.producer.produce("arrow", b"{}", partition=0)
    broker.producer.flush(20)
    with pytest.raises(DataError, match="message at offset 1 of partition 0 is not a stream of Arrow rows"):
        fit(raw, tmp_path / "second")
    with pytest.raises(ValueError, match="kafka://HOST:PORT/TOPIC"):
        fit({**raw, "name": "other", "data": {**raw["data"], "train": "kafka://host"}}, tmp_path / "third")
    with pytest.raises(ValueError, match="joins folders"):
        parse_config({**raw, "data": {**raw["data"], "follow": {"join": {"events": "events", "window": "1h"}}}})


def launch(group: dist.ProcessGroup, raw: dict[str, Any], log: str, dies: dict[int, int]) -> str:
    past = {**raw, "data": {**raw["data"], "train": raw["data"]["eval"], "follow": None}}
    job = replace(make_job(past), config=parse_config(raw))
    return train_noted(job, group, log, dies)


@pytest.mark.long
def test_every_message_once_on_2_then_3_then_1_ranks_with_a_kill(tmp_path: Path, broker: Broker) -> None:
    raw = topic_config(tmp_path, broker.uri("many"), rows=90)
    raw["trainer"]["checkpoint_every"] = 2
    raw["data"]["eval"] = str(tmp_path / "eval")
    write(tmp_path / "eval", [20])
    trained: list[int] = []
    broker.send("many", 0, 200)
    for number, (world, dies) in enumerate([(2, {1: 4}), (3, {}), (1, {})]):
        before, log = committed(tmp_path), tmp_path / f"launch-{number}"
        try:
            on_ranks(world, launch, raw, str(log), dies)
        except RankError as error:
            assert set(str(error).splitlines()) == {"rank 1: the process died"} and dies
        by_rank, done = [noted(log, rank) for rank in range(world)], committed(tmp_path) - before
        trained += [row for lines in by_rank for step in lines[:done] for row in step]
        broker.send("many", 200 + 50 * number, 250 + 50 * number)
    assert sorted(trained) == list(range(300))


def chunk_rows(following: Follower, number: int) -> list[int]:
    """The rows of a chunk, which takes a moment to arrive."""
    for _ in range(200):
        if (chunk := following.chunk(number)) is not None:
            files = [chunk.manifest.files[at].uri for at in range(len(chunk.manifest.files))]
            return [row for file in files for row in pq.read_table(file)["row"].to_pylist()]
    raise AssertionError("no rows have arrived")


def test_the_topic_comes_after_all_of_the_past(tmp_path: Path, broker: Broker) -> None:
    broker.send("after", 0, 60)
    raw, told = topic_config(tmp_path, broker.uri("after"), backfill=str(tmp_path / "past")), list[str]()
    with closing(follower(raw, tmp_path, told)) as following:
        with pytest.raises(DataError, match=r"backfill: the folder does not exist.*past"):
            following.chunk(0)
        write(tmp_path / "past", [0, 1])
        whole = (tmp_path / "past/001.parquet").read_bytes()
        (tmp_path / "past/001.parquet").write_bytes(whole[:100])  # is being copied
        assert chunk_rows(following, 0) == list(range(40))
        assert following.chunk(1) is None
        assert len(told) == 1 and "not complete" in told[0] and "001.parquet" in told[0]
        (tmp_path / "past/001.parquet").write_bytes(whole)
        assert chunk_rows(following, 1) == list(range(40, 80))
        broker.send("after", 80, 90)
        rows = chunk_rows(following, 2)
        assert rows[0] >= 80
        (tmp_path / "landed/000000002.parquet").write_bytes(b"half")
        assert chunk_rows(following, 2) == rows  # read again


def test_columns_that_are_not_read_may_hold_anything_and_times_are_texts_or_numbers(
    tmp_path: Path, broker: Broker
) -> None:
    raw = topic_config(tmp_path, broker.uri("mixed"))
    times = ["1970-01-01T00:00:07", "1970-01-01T00:00:05.500Z", "1970-01-01T02:00:06.5+02:00", "1970-01-01 00:00:04.25"]
    rows = [{**row, "when": time} for row, time in zip(broker.rows(0, 4).to_pylist(), times, strict=True)]
    for number, other in enumerate([1, "a", {"b": None}, [2.5]]):
        broker.put("mixed", {**rows[number], "other": other}, number % PARTITIONS)
    with closing(follower(raw, tmp_path / "texts", [])) as following:
        taken, number = list[int](), 0
        while len(taken) < 6:  # in one chunk or several
            taken += chunk_rows(following, number)
            if len(taken) == 4:
                assert (chunk := following.chunk(number)) is not None and chunk.watermark_us == 5_500_000
                broker.put("mixed", {**rows[0], "when": 7.5}, 0)
                broker.put("mixed", {**rows[0], "when": 8}, 0)
            number += 1
        assert sorted(taken[:4]) == [0, 1, 2, 3]
        broker.put("mixed", {**rows[0], "when": 9}, 0)
        broker.put("mixed", {**rows[0], "when": "then"}, 1)
        with pytest.raises(DataError, match=r"offset \d of partition 1 is not .*then"):
            for later in range(number, number + 2):
                chunk_rows(following, later)
    raw = topic_config(tmp_path, broker.uri("clash"))
    broker.put("clash", {**rows[0], "when": 9}, 0)
    broker.put("clash", {**rows[0]}, 0)
    with (
        closing(follower(raw, tmp_path / "clash", [])) as following,
        pytest.raises(DataError, match=r"is int64 in one message, timestamp.*column 'when'"),
    ):
        chunk_rows(following, 0)


class Changed:
    """confluent_kafka, whose consumers return what `change` makes of the messages."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
        self.change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(kafka, name)

    def Consumer(self, properties: dict[str, Any]) -> Any:
        self.consumer = kafka.Consumer(properties)
        return self

    def consume(self, limit: int, timeout: float) -> list[Any]:
        return self.change(self.consumer.consume(limit, timeout))

    def assign(self, places: list[Any]) -> None:
        self.consumer.assign(places)

    def close(self) -> None:
        self.consumer.close()


class Broken:
    """A message in whose place there is an error."""

    def error(self) -> Any:
        return kafka.KafkaError(kafka.KafkaError._TRANSPORT, "the connection was closed")

    def partition(self) -> int:
        return 1


def opened(raw: dict[str, Any]) -> KafkaTopic:
    settings = parse_config(raw)
    return KafkaTopic(raw["data"]["train"], settings.training_schema)


def read(topic: KafkaTopic, offsets: dict[str, int], rows: int, limit: int = 1000) -> list[int]:
    """The first rows from offsets on; new messages take a moment."""
    seen: list[int] = []
    for _ in range(100):
        tables, offsets = topic.read(offsets, limit)
        for table in tables.values():
            seen += table["row"].to_pylist()
        if len(seen) >= rows:
            break
    return seen


def test_a_read_that_failed_is_read_again_from_its_offsets(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send("broken", 0, 9)
    errors = [Broken()]
    monkeypatch.setitem(
        sys.modules, "confluent_kafka", Changed(lambda some: [errors.pop(), *some] if some and errors else some)
    )
    with closing(opened(topic_config(tmp_path, broker.uri("broken")))) as topic:
        start = {str(number): 0 for number in range(PARTITIONS)}
        with pytest.raises(DataUnavailable, match="partition 1 cannot be read"):
            read(topic, start, 9)
        assert sorted(read(topic, start, 9)) == list(range(9))


def test_a_read_ends_at_its_number_of_rows_and_after_a_second(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, 30, 60):
        broker.send("batches", first, first + 30, "arrow")
    with closing(opened(topic_config(tmp_path, broker.uri("batches", "arrow")))) as topic:
        read(topic, {"0": 0}, 90)  # they have arrived
        tables, stop = topic.read({"0": 0}, 40)
        while not tables:
            tables, stop = topic.read({"0": 0}, 40)
        assert stop == {"0": 2} and tables["0"]["row"].to_pylist() == list(range(60))

    last: list[Any] = []

    def trickle(found: list[Any]) -> list[Any]:
        """A message whenever it is asked for, once there was one."""
        last[:] = found[-1:] or last
        return last

    monkeypatch.setitem(sys.modules, "confluent_kafka", Changed(trickle))
    with closing(opened(topic_config(tmp_path, broker.uri("batches", "arrow")))) as topic:
        while not topic.read({"0": 0}, 10**9)[0]:
            pass
