"""Malformed bodies over real HTTP: a 4xx, never a crash, never a 5xx, never an answer for a row that is not valid."""

from __future__ import annotations

import gc
import gzip
import http.client
import json
import math
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from rayrec.serve import ARROW, JSON, App, Limits, ModelSpec, Service
from tests.serve.server import GOOD, GrpcServer, Server
from tests.train import small

SCHEMA = pa.schema(
    {"user": pa.int64(), "item": pa.int64(), "tags": pa.list_(pa.int64()), "age": pa.float64(), "city": pa.string()}
)
ODD = [b"-1", b"9" * 25, b"null", b"[]", b"{}", b'"', b"1e999", b"\\u0000", b"true", b"[[[[", b'"\\ud800"', b"1.5"]


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def json_body(drawn: random.Random) -> bytes:
    rows = [GOOD] * drawn.randint(1, 3)
    shapes: list[Any] = [
        {"rows": rows},
        {"rows": {name: [row[name] for row in rows] for name in GOOD}},
        {"context": {"user": 1, "age": 0.5}, "candidates": [{"item": 2, "tags": [1], "city": "city 1"}] * len(rows)},
    ]
    body = bytearray(json.dumps(drawn.choice(shapes)).encode())
    for _ in range(drawn.randint(1, 6)):
        at = drawn.randrange(len(body))
        kind = drawn.randrange(4)
        if kind == 0:
            body[at] = drawn.randrange(256)
        elif kind == 1:
            del body[at : at + drawn.randint(1, 9)]
        elif kind == 2:
            body[at:at] = drawn.choice(ODD)
        else:
            body = body[:at] + body[drawn.randrange(len(body)) :]
        body = body or bytearray(b" ")
    return bytes(body)


def arrow_body(drawn: random.Random) -> bytes:
    """Flipped bits, cut ends, other types and layouts, ids and numbers that are not allowed."""
    rows = [dict(GOOD) for _ in range(drawn.randint(1, 3))]
    if drawn.random() < 0.4:
        bad: dict[str, list[Any]] = {
            "user": [-1, 10**6, None, -(2**63)],
            "tags": [[-1], [10**9], [None], None],
            "age": [math.nan, math.inf],
        }
        name = drawn.choice(list(bad))
        rows[drawn.randrange(len(rows))][name] = drawn.choice(bad[name])
    table = pa.Table.from_pylist(rows, SCHEMA)
    if drawn.random() < 0.3:
        name, kind = drawn.choice(
            [("user", pa.int8()), ("user", pa.string()), ("tags", pa.list_view(pa.int64())), ("city", pa.binary())]
        )
        try:
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        except pa.ArrowException:
            table = table.drop_columns(name)
    body = bytearray(stream(table, compression=drawn.choice([None, None, None, "zstd"])))
    for _ in range(drawn.randint(0, 4)):
        at, kind = drawn.randrange(len(body)), drawn.randrange(3)
        if kind == 0:
            body[at] ^= 1 << drawn.randrange(8)
        elif kind == 1:
            body = body[:at] or bytearray(b" ")
        else:
            body[at : at + 4] = struct.pack("<i", drawn.choice([-1, 2**31 - 1, 0, 10**6]))
    return bytes(body)


def rows_in(body: bytes, kind: str) -> list[dict[str, Any]]:
    """As JSON and Arrow read it by themselves."""
    if kind == ARROW:
        found: list[dict[str, Any]] = pa.ipc.open_stream(body).read_all().to_pylist()
        return found
    raw = json.loads(body)
    rows = raw.get("rows", raw.get("candidates"))
    if isinstance(rows, dict):
        assert len({len(column) for column in rows.values()}) == 1
        rows = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return [{**raw.get("context", {}), **row} for row in rows]


def assert_valid(row: dict[str, Any]) -> None:
    assert 0 <= row["user"] < small.USERS and row["user"] == int(row["user"])
    assert isinstance(row["item"], int | str | float | bytes) and all(0 <= tag < small.TAGS for tag in row["tags"])
    assert isinstance(row["city"], str | bytes) and math.isfinite(np.float32(row["age"]))


def fuzz(port: int, count: int, seed: int) -> tuple[int, int]:
    """Sends so many over one connection; returns how many were refused, and how many were valid all the same."""
    drawn, statuses = random.Random(seed), {200: 0, 400: 0, 413: 0, 422: 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in range(count):
        kind = (JSON, ARROW)[number % 2]
        body = arrow_body(drawn) if kind == ARROW else json_body(drawn)
        connection.request("POST", "/score", body, {"content-type": kind, "accept": JSON})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status in statuses, (response.status, body, answer)
        statuses[response.status] += 1
        if response.status != 200:
            assert answer["error"]
            continue
        rows, scores = rows_in(body, kind), answer["scores"]["label"]
        assert len(rows) == len(scores) and all(0 <= score <= 1 for score in scores), body
        for row in rows:
            assert_valid(row)
    connection.close()
    return count - statuses[200], statuses[200]


LONG = "x" * 40_000
LIMIT = 1 << 20  # bytes of a body, of the service of these tests
WORST = 64  # times as many bytes as the body may have: the peak of a request of JSON, tensors or gRPC


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Asserts that the process does not take so many bytes more, at any moment."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < size, (memory("VmHWM") - before, size)


def memory(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def filled(head: str, item: str, tail: str) -> bytes:
    """As many items as a body may have, with a comma between two."""
    count = (LIMIT - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


V2_TAIL = '],"shape":[1],"datatype":"INT64","name":"user"}]}'
BODIES = {
    **{f"rows of {item}": ("/score", filled('{"rows":[', item, "]}")) for item in ("{}", '{"":0}', '{"user":1}', "[]")},
    **{
        f"tags of {item}": (
            "/score",
            filled('{"rows":{"user":[1],"item":[1],"age":[0],"city":["x"],"tags":[[', item, "]]}}"),
        )
        for item in ("1", "0.5", "[]", "{}", '"ab"', '{"":0}')
    },
    "keys": ("/score", ("{" + ",".join(f'"{number:x}":0' for number in range(90_000)) + "}").encode()),
    "columns": ("/score", ('{"rows":{' + ",".join(f'"{number:x}":[]' for number in range(80_000)) + "}}").encode()),
    "nested lists": ("/score", b'{"rows":' + b"[" * (LIMIT - 10)),
    "a long text": ("/score", ('{"rows":[{"city":"\\ud83d\\ude00' + "x" * (LIMIT - 100) + '"}]}').encode()),
    **{
        f"tensor of {item}": ("/v2/models/ctr/infer", filled('{"inputs":[{"data":[', item, V2_TAIL))
        for item in ("1", '"ab"', "[]", '{"":0}')
    },
    "tensors": (
        "/v2/models/ctr/infer",
        filled('{"inputs":[', '{"name":"user","shape":[0],"datatype":"INT8","data":[]}', "]}"),
    ),
    "outputs": ("/v2/models/ctr/infer", filled('{"inputs":[],"outputs":[', '{"name":""}', "]}")),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_worst_bodies_are_refused_in_bounded_memory(server: Server, name: str) -> None:
    path, body = BODIES[name]
    assert LIMIT // 2 < len(body) <= LIMIT
    with at_most(WORST * LIMIT):
        status, answer = server.ask("POST", path, body)
    assert status in (400, 413, 422) and answer["error"], answer


def test_binary_and_compressed_bodies_are_refused_in_bounded_memory(server: Server) -> None:
    head = json.dumps(
        {
            "inputs": [
                {"name": "city", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": LIMIT // 2}}
            ]
        }
    ).encode()
    bomb = gzip.compress(bytes(200 * LIMIT), 1)
    for path, body, headers, status in (
        ("/v2/models/ctr/infer", head + bytes(LIMIT // 2), {"inference_header_content_length": str(len(head))}, 422),
        ("/score", bomb[: LIMIT - 1], {"content_encoding": "gzip"}, 415),
    ):
        with at_most(WORST * LIMIT):
            assert server.ask("POST", path, body, **headers)[0] == status


def test_the_worst_messages_are_refused_in_bounded_memory(service: Service) -> None:
    """Empty tensors take two bytes of a message of gRPC, and a hundred of memory."""

    def bytes_field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    model, tensor = bytes_field(1, b"ctr"), bytes_field(1, b"user") + bytes_field(2, b"INT8") + bytes_field(3, b"\0")
    rpc = GrpcServer(service)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for field in (bytes_field(5, b""), bytes_field(5, tensor), bytes_field(6, b""), bytes_field(7, b"")):
                sent = model + field * ((LIMIT - len(model)) // len(field))
                with at_most(WORST * LIMIT), pytest.raises(grpc.RpcError) as error:
                    infer(sent, timeout=60)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    finally:
        rpc.close()


def repeated(value: Any) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(np.zeros(500, np.int8), pa.array([value]))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("tags", lambda: pa.ListArray.from_arrays(pa.array([0, 10**8], pa.int32()), pa.nulls(10**8))),
        ("tags", lambda: pa.FixedSizeListArray.from_arrays(pa.nulls(10**8), 10**6)),
        ("tags", lambda: pa.ListViewArray.from_arrays([0] * 500, [5000] * 500, pa.array(range(5000)))),
        ("tags", lambda: pa.ListViewArray.from_arrays([0] * 500, [1] * 500, pa.array([LONG]))),
        ("tags", lambda: repeated([LONG, LONG])),
        ("tags", lambda: pa.ListArray.from_arrays(pa.array(range(501), pa.int32()), repeated(LONG))),
        ("city", lambda: repeated(LONG)),
        ("city", lambda: pa.StructArray.from_arrays([repeated(LONG), pa.nulls(500)], ["a", "b"])),
    ],
)
def test_a_small_body_that_decodes_to_much_is_refused_in_little_memory(
    server: Server, name: str, column: Callable[[], pa.Array]
) -> None:
    values = column()
    table = pa.Table.from_pylist([GOOD] * len(values), SCHEMA)
    body = stream(table.set_column(table.column_names.index(name), name, values))
    with at_most(WORST * LIMIT):
        status, answer = server.ask("POST", "/score", body, content_type=ARROW, accept=JSON)
    assert len(body) < 300_000 and status == 413 and "decoded" in answer["error"], (len(body), answer)


def test_malformed_bodies_are_never_answered_and_never_a_crash(server: Server) -> None:
    refused, valid = fuzz(server.port, 1000, seed=7)
    assert refused > 500 and valid > 50
    assert server.ask("POST", "/score", {"rows": [GOOD]})[0] == 200


@pytest.mark.long
def test_ten_thousand_malformed_bodies(server: Server) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    refused, valid = fuzz(server.port, 10_000, seed)
    assert refused > 5000 and valid > 300  # about 500 are valid all the same
    assert server.ask("POST", "/score", {"rows": [GOOD]})[0] == 200


NESTED = {
    "lists": b'{"rows": [{"user": 1, "item": 2, "age": 1, "city": "a", "tags": %s1%s}]}' % (b"[" * 900, b"]" * 900),
    "objects": b'{"rows": [{"user": 1, "tags": %s1%s}]}' % (b'{"a":' * 900, b"}" * 900),
    "context": b'{"context": {"tags": %s%s}, "candidates": [{"user": 1}]}' % (b"[" * 900, b"]" * 900),
    "columns": b'{"rows": {"tags": %s%s}}' % (b"[" * 900, b"]" * 900),
}


@pytest.mark.parametrize("shape", NESTED)
def test_what_is_nested_deeply_costs_nothing(service: Service, server: Server, shape: str) -> None:
    """Arrow's types of such lists would take seconds, and gigabytes."""
    status, answer = server.ask("POST", "/score", NESTED[shape])
    assert status == 400 and "nested" in answer["error"]


def bombs() -> dict[str, bytes]:
    """Small streams of what would be very large."""
    many = 400
    views = pa.ListViewArray.from_arrays(
        pa.array(np.zeros(many, np.int32)), pa.array(np.full(many, 90_000, np.int32)), pa.array(np.zeros(90_000, int))
    )
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2**31 - 1], pa.int32()), pa.array(["x"]))
    few = pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array(["x"]))
    return {
        "overlapping": stream(pa.table({"tags": views})),
        "runs": stream(pa.table({"city": runs})),
        "encoded": stream(pa.table({"city": few})),
        "nulls": stream(pa.table({"city": pa.nulls(1 << 20)})),
        "compressed": stream(pa.table({"user": np.zeros(1_000_000, np.int8)}), compression="zstd"),
    }


@pytest.mark.parametrize(
    ("bomb", "status", "text"),
    [
        ("overlapping", 413, "decoded"),
        ("runs", 413, "rows"),
        ("encoded", 422, "run-end"),
        ("nulls", 413, "1,048,576 rows"),
        ("compressed", 400, "uncompressed"),
    ],
)
def test_small_streams_of_much_are_refused_before_they_are_unpacked(
    server: Server, bomb: str, status: int, text: str
) -> None:
    found, answer = server.ask("POST", "/score", bombs()[bomb], content_type=ARROW)
    assert found == status and text in answer["error"], answer


def test_overlapping_lists_are_scored_as_what_they_are(server: Server) -> None:
    tags = pa.ListViewArray.from_arrays(pa.array([1, 0], pa.int32()), pa.array([2, 3], pa.int32()), pa.array([1, 2, 3]))
    plain = pa.Table.from_pylist([{**GOOD, "tags": [2, 3]}, {**GOOD, "tags": [1, 2, 3]}], SCHEMA)
    shared = plain.set_column(2, "tags", tags)
    answers = [
        server.ask("POST", "/score", stream(table), content_type=ARROW, accept=JSON) for table in (plain, shared)
    ]
    assert answers[0][0] == 200 and answers[0] == answers[1]


def test_encodings_and_large_bodies_are_refused(server: Server) -> None:
    assert server.ask("POST", "/score", b"\x1f\x8b", content_encoding="gzip")[0] == 415
    million = b'{"context": {}, "candidates": [' + b",".join([b"{}"] * 300_000) + b"]}"
    status, answer = server.ask("POST", "/score", million)
    assert status == 413 and "300,000 rows" in answer["error"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", "/score")
    connection.putheader("content-length", str(100 << 20))
    connection.endheaders()
    response = connection.getresponse()  # before the body is sent
    assert response.status == 413 and b"104,857,600 bytes" in response.read()
    connection.close()


@pytest.fixture
def hasty(model: Path) -> Iterator[Server]:
    made = Server(App(Service([ModelSpec(name="ctr", path=model)], limits=Limits(body_s=0.5))))
    yield made
    made.close()


def test_bodies_that_never_end_are_given_up_and_others_answered_meanwhile(hasty: Server) -> None:
    head = b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    halves = [socket.create_connection(("127.0.0.1", hasty.port), timeout=30) for _ in range(20)]
    for half in halves[:10]:
        half.sendall(head + b'{"rows"')
    for half in halves[10:]:
        half.sendall(head[:40])  # not even a whole head
    assert hasty.ask("POST", "/score", {"rows": [GOOD]})[0] == 200
    for half in halves[:10]:
        assert b" 408 " in half.recv(4096).split(b"\r\n")[0]
    assert hasty.ask("POST", "/score", {"rows": [GOOD]})[0] == 200
    for half in halves:
        half.close()
    gone = socket.create_connection(("127.0.0.1", hasty.port), timeout=30)
    gone.sendall(head + b'{"rows"')
    gone.close()  # a client that dies in the middle
    time.sleep(0.1)
    assert hasty.ask("POST", "/score", {"rows": [GOOD]})[0] == 200
    assert threading.active_count() < 100
