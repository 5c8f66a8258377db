"""`KafkaTopic`: reads rows of a Kafka topic at offsets of our own, without a consumer group.

A message is a row as a JSON object, or rows as an Arrow IPC stream. Needs `rayrec[kafka]`.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from rayrec.data.arrays.arrow_types import is_text, micros_of
from rayrec.data.mapping.null_types import expected_types
from rayrec.data.mapping.schema import Schema, Timestamp
from rayrec.storage.errors import DataError, DataUnavailable, first_line

SCHEME = "kafka://"
# A JSON file of librdkafka's properties for secured clusters, so that no secret stands in a config.
PROPERTIES = "RAYREC_KAFKA_PROPERTIES"
Offsets = dict[str, int]  # by partition; texts, as keys of JSON are
_PATIENCE_S = 20.0
_LINGER_S = 0.05  # without a message, a read ends
READ_S = 1.0  # a read ends, as the other ranks wait for it
_SAMPLE = 100  # messages that tell the types which the schema does not
_READ_BYTES = 256 << 20  # of messages in memory
# Messages taken at once. Those of Arrow hold many rows each.
_AT_ONCE = {"json": 100, "arrow": 1}


@dataclass(frozen=True, slots=True)
class Address:
    """`kafka://HOST:PORT[,HOST:PORT]/TOPIC[?format=json|arrow]`."""

    brokers: str
    topic: str
    format: str

    @classmethod
    def parse(cls, uri: str) -> Address:
        """
        Raises:
            ValueError: another form.
        """
        place, _, query = uri.removeprefix(SCHEME).partition("?")
        brokers, _, topic = place.partition("/")
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        kind = options.pop("format", "json")
        if not uri.startswith(SCHEME) or not brokers or not topic or options or kind not in ("json", "arrow"):
            raise ValueError(f"{uri} is not of the form kafka://HOST:PORT/TOPIC?format=json, or format=arrow")
        return cls(brokers, topic, kind)


class KafkaTopic:
    """A topic.

    Args:
        schema: of the columns to read. Others are left out, whatever their values are.
        timestamp: column with the time of the rows, read too.

    Raises:
        DataError: `rayrec[kafka]` is not installed, or the topic does not exist.
        DataUnavailable: the brokers do not answer.
    """

    def __init__(self, uri: str, schema: Schema, timestamp: Timestamp | None = None) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise DataError("reading Kafka needs confluent-kafka", fix="pip install 'rayrec[kafka]'") from error
        self._kafka: Any = confluent_kafka
        self.uri, self._address = uri, Address.parse(uri)
        self._time = None if timestamp is None else timestamp.column
        self._columns = list(dict.fromkeys([*schema.columns, *([] if timestamp is None else [timestamp.column])]))
        # Times are texts or numbers, and the schema does not tell the types of inputs of derived columns.
        types = expected_types(schema.model_copy(update={"timestamp": None}))
        self._types = {name: kind for name, kind in types.items() if name in self._columns}
        self._untyped = [name for name in self._columns if name not in self._types]
        properties: dict[str, Any] = {}
        if os.environ.get(PROPERTIES):
            with open(os.environ[PROPERTIES], encoding="utf-8") as file:
                properties = json.load(file)
        # librdkafka wants a group's name; without subscriptions and commits there is no group.
        self._consumer: Any = self._kafka.Consumer(
            {
                **properties,
                "bootstrap.servers": self._address.brokers,
                "group.id": "rayrec",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "log_level": 2,
            }
        )
        self._at: Offsets = {}  # of the next messages that the consumer returns

    def close(self) -> None:
        """Ends the connections."""
        self._consumer.close()

    def partitions(self) -> list[str]:
        """The partitions, in order."""
        found = self._asked(lambda: self._consumer.list_topics(self._address.topic, timeout=_PATIENCE_S))
        topic = found.topics[self._address.topic]
        if topic.error is not None or not topic.partitions:
            raise DataError(f"the topic cannot be read: {topic.error}", file=self.uri, fix="create it")
        return [str(number) for number in sorted(topic.partitions)]

    def first_offsets(self, since_us: int | None) -> Offsets:
        """Where each partition begins, or its first message that is not older than a time.

        A broker that cannot look up times lets all messages be read; the caller leaves out older rows.
        """
        offsets: Offsets = {}
        for name in self.partitions():
            low, high = self._ends(name)
            offsets[name] = low
            if since_us is not None and high > low:
                place = self._kafka.TopicPartition(self._address.topic, int(name), since_us // 1000)
                (found,) = self._asked(lambda place=place: self._consumer.offsets_for_times([place], _PATIENCE_S))
                offsets[name] = found.offset if found.offset >= 0 else low
        return offsets

    def behind(self, offsets: Offsets, names: Collection[str]) -> bool:
        """Whether some of the partitions have messages that were not read."""
        return any(self._ends(name)[1] > offsets[name] for name in names)

    def read(self, offsets: Offsets, max_rows: int) -> tuple[dict[str, pa.Table], Offsets]:
        """(the rows that have arrived at offsets, by partition; the offsets after them). Does not wait for more.

        Args:
            max_rows: ends with the message that reaches it. A read also ends after `READ_S` seconds, and at 256 MiB.

        Raises:
            DataError: offsets that the broker has removed; a message that is not a row.
        """
        self._assign(offsets)
        # Unknown while reading: after an error, the next read assigns again, so that no message is passed over.
        at, self._at = dict(offsets), {}
        messages: dict[str, list[Any]] = {}
        rows, num_bytes, until = 0, 0, time.monotonic() + READ_S
        while rows < max_rows and num_bytes < _READ_BYTES and time.monotonic() < until:
            found = self._consumer.consume(min(_AT_ONCE[self._address.format], max_rows - rows), timeout=_LINGER_S)
            if not found:
                break
            for message in found:
                name = str(message.partition())
                if message.error() is not None:
                    raise self._failed(message.error(), name, at.get(name))
                at[name] = message.offset() + 1
                if message.value() is not None:
                    messages.setdefault(name, []).append(message)
                    rows += self._num_rows(message.value())
                    num_bytes += len(message.value())
        tables = {name: self._table(messages[name]) for name in sorted(messages, key=int)}
        self._at = at
        return tables, dict(at)

    def read_again(self, start: Offsets, stop: Offsets) -> dict[str, pa.Table]:
        """The rows between offsets, by partition."""
        messages: dict[str, list[Any]] = {}
        for name, end in stop.items():
            at, until = start.get(name, end), time.monotonic() + _PATIENCE_S
            self._assign({name: at})
            self._at = {}
            while at < end:
                found = self._consumer.consume(min(10_000, end - at), timeout=1.0)
                for message in found:
                    if message.error() is not None:
                        raise self._failed(message.error(), name, at)
                    at = message.offset() + 1
                    if message.value() is not None and message.offset() < end:
                        messages.setdefault(name, []).append(message)
                until = time.monotonic() + _PATIENCE_S if found else until
                if time.monotonic() > until:
                    raise DataUnavailable(f"no message of partition {name} at offset {at}", file=self.uri)
        return {name: self._table(messages[name]) for name in sorted(messages, key=int)}

    def _num_rows(self, value: bytes) -> int:
        if self._address.format == "json":
            return 1
        try:
            return sum(batch.num_rows for batch in pa.ipc.open_stream(value))
        except (pa.ArrowException, OSError):
            return 1  # named when the messages are parsed

    def _assign(self, offsets: Offsets) -> None:
        if offsets != self._at:
            topic = self._address.topic
            self._consumer.assign([self._kafka.TopicPartition(topic, int(name), at) for name, at in offsets.items()])
            self._at = dict(offsets)

    def _ends(self, name: str) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._address.topic, int(name))
        low, high = self._asked(lambda: self._consumer.get_watermark_offsets(place, timeout=_PATIENCE_S))
        return low, high

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except self._kafka.KafkaException as error:
            raise DataUnavailable(
                f"the brokers do not answer: {first_line(error)}",
                file=self.uri,
                fix="check the address and the network",
            ) from error

    def _failed(self, error: Any, partition: str, offset: int | None) -> DataError:
        if error.code() in (self._kafka.KafkaError._AUTO_OFFSET_RESET, self._kafka.KafkaError.OFFSET_OUT_OF_RANGE):
            return DataError(
                f"partition {partition} no longer has the messages from offset {offset} on",
                file=self.uri,
                fix="keep them longer (retention.ms), or start a new run with init_from this run",
            )
        return DataUnavailable(f"partition {partition} cannot be read: {error.str()}", file=self.uri)

    def _table(self, messages: list[Any]) -> pa.Table:
        values = [message.value() for message in messages]
        try:
            return self._parsed(values)
        except (pa.ArrowException, ValueError):
            tables = []
            for message in messages:
                try:
                    tables.append(self._parsed([message.value()]))
                except (pa.ArrowException, ValueError) as error:
                    kind = "JSON object" if self._address.format == "json" else "stream of Arrow rows"
                    raise DataError(
                        f"the message at offset {message.offset()} of partition {message.partition()} is not a {kind}: "
                        f"{first_line(error)}",
                        file=self.uri,
                        fix="correct the producer; skip the message by a new run that starts later",
                    ) from error
            return together(tables, self.uri)

    def _parsed(self, values: list[bytes]) -> pa.Table:
        if self._address.format == "json":
            return self._with_times(self._of_json(values))
        tables = [pa.ipc.open_stream(value).read_all() for value in values]
        needed = [table.select([name for name in self._columns if name in table.column_names]) for table in tables]
        return together([self._with_times(table) for table in needed], self.uri)

    def _of_json(self, values: list[bytes]) -> pa.Table:
        try:
            return self._read_json(values, values[:_SAMPLE])
        except (pa.ArrowException, ValueError):
            if len(values) <= _SAMPLE:
                raise
            return self._read_json(values, values)  # later values have another type

    def _read_json(self, values: list[bytes], sample: list[bytes]) -> pa.Table:
        kinds = dict(self._types)
        if self._untyped:
            rows = [row for row in map(json.loads, sample) if isinstance(row, dict)]
            for name in self._untyped:
                if found := [row[name] for row in rows if row.get(name) is not None]:
                    kinds[name] = pa.infer_type(found)
        parsing = pj.ParseOptions(
            explicit_schema=pa.schema(list(kinds.items())), newlines_in_values=True, unexpected_field_behavior="ignore"
        )
        return pj.read_json(io.BytesIO(b"\n".join(values)), parse_options=parsing)

    def _with_times(self, table: pa.Table) -> pa.Table:
        """The table with times that are texts as timestamps."""
        name = self._time
        if (
            name is None
            or name not in table.column_names
            or name in self._types
            or not is_text(table.schema.field(name).type)
        ):
            return table
        texts = table[name].combine_chunks()
        known = micros_of(texts.drop_null(), "us")
        times = pa.nulls(len(texts), pa.timestamp("us", "UTC"))
        times = pc.replace_with_mask(times, texts.is_valid(), pa.array(known, pa.timestamp("us", "UTC")))
        return table.set_column(table.column_names.index(name), name, times)


def together(tables: Sequence[pa.Table], file: str) -> pa.Table:
    """The rows of all tables.

    Raises:
        DataError: a column has types that do not go together.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        kinds: dict[str, pa.DataType] = {}
        for field in (field for table in tables for field in table.schema):
            known = kinds.setdefault(field.name, field.type)
            try:
                pa.unify_schemas(
                    [pa.schema([(field.name, kind)]) for kind in (known, field.type)], promote_options="permissive"
                )
            except pa.ArrowException:
                problem = f"a column is {known} in one message, {field.type} in another"
                raise DataError(problem, file=file, column=field.name, fix="correct the producer") from error
        raise DataError(
            f"the messages do not go together: {first_line(error)}", file=file, fix="correct the producer"
        ) from error
