"""The open inference protocol by a client that is not ours (tritonclient): scores are those of `/score`; and malformed
messages are refused, over HTTP and gRPC.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rayrec.data import Schema
from rayrec.serve import Limits, ModelSpec, Service, TlsConfig
from rayrec.serve.v2 import DTYPES, inputs_of, query_of, tensor_of
from rayrec.serve.v2_messages import SERVICE, message
from tests.serve.server import GOOD, GrpcServer, Server, clients_of

triton_http = pytest.importorskip("tritonclient.http")
triton_grpc = pytest.importorskip("tritonclient.grpc")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

JSON_LENGTH = "Inference-Header-Content-Length"  # of the protocol: bytes of JSON before the binary tensors
ROWS = [GOOD, {**GOOD, "user": 3, "tags": [], "city": "nowhere"}, {**GOOD, "item": 7, "tags": [3]}]


def columns(rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    """Rows as the protocol's tensors."""
    return {
        "user": np.array([row["user"] for row in rows]),
        "item": np.array([row["item"] for row in rows]),
        "tags": np.array([tag for row in rows for tag in row["tags"]], np.int64),
        "tags.lengths": np.array([len(row["tags"]) for row in rows]),
        "age": np.array([row["age"] for row in rows]),
        "city": np.array([row["city"].encode() for row in rows], np.object_),
    }


def inputs(module: Any, values: dict[str, Any], **options: Any) -> list[Any]:
    made = []
    for name, value in values.items():
        kind = {"i": "INT64", "f": "FP64", "O": "BYTES"}[value.dtype.kind]
        one = module.InferInput(name, list(value.shape), kind)
        one.set_data_from_numpy(value, **options)
        made.append(one)
    return made


@pytest.fixture(scope="module")
def rpc(service: Service) -> Iterator[GrpcServer]:
    made = GrpcServer(service)
    yield made
    made.close()


@pytest.fixture
def clients(server: Server, rpc: GrpcServer) -> dict[str, tuple[Any, Any]]:
    """By protocol: the client's module, and a client."""
    return {
        "http": (triton_http, triton_http.InferenceServerClient(f"127.0.0.1:{server.port}")),
        "grpc": (triton_grpc, triton_grpc.InferenceServerClient(f"127.0.0.1:{rpc.port}")),
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_foreign_client_gets_the_scores_of_the_service(
    server: Server, clients: dict[str, tuple[Any, Any]], protocol: str
) -> None:
    module, client = clients[protocol]
    told = server.ask("POST", "/score", {"rows": ROWS})[1]
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ctr")
    assert not client.is_model_ready("none")
    found = client.infer("ctr", inputs(module, columns()), request_id="mine-1")
    assert found.as_numpy("label").tolist() == np.float32(told["scores"]["label"]).tolist()
    answer = found.get_response()
    name, version, number = (
        (answer["model_name"], answer["model_version"], answer["id"])
        if protocol == "http"
        else (answer.model_name, answer.model_version, answer.id)
    )
    assert (name, version, number) == ("ctr", told["version"], "mine-1")
    wanted = [module.InferRequestedOutput("label")]
    again = client.infer("ctr", inputs(module, columns()), told["version"], outputs=wanted)
    assert again.as_numpy("label").tolist() == found.as_numpy("label").tolist()
    with pytest.raises(InferenceServerException, match="no output 'none'"):
        client.infer("ctr", inputs(module, columns()), outputs=[module.InferRequestedOutput("none")])
    with pytest.raises(InferenceServerException, match=r"version 'v0' of model .* is not active"):
        client.infer("ctr", inputs(module, columns()), "v0")
    with pytest.raises(InferenceServerException, match=r"row 1: .*'user'|'user'.*row 1"):
        client.infer("ctr", inputs(module, columns([GOOD, {**GOOD, "user": -1}])))
    metadata = client.get_model_metadata("ctr")
    entries = metadata["inputs"] if protocol == "http" else metadata.inputs
    names = [one["name"] if protocol == "http" else one.name for one in entries]
    assert sorted(names) == sorted(columns())


# In a process of its own: its package registers the same messages of gRPC as tritonclient.
KSERVE = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

inputs = []
for name, kind, values in json.load(sys.stdin):
    inputs.append(InferInput(name, [len(values)], kind))
    inputs[-1].set_data_from_numpy(np.array(values, np.object_ if kind == "BYTES" else None), binary_data=False)
request = InferRequest("ctr", inputs, request_id="mine-2")

async def ask():
    if sys.argv[1] == "grpc":
        client = InferenceGRPCClient("127.0.0.1:" + sys.argv[2])
        assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("ctr")
        return await client.infer(request)
    client, url = InferenceRESTClient(RESTConfig(protocol="v2")), "http://127.0.0.1:" + sys.argv[2]
    assert await client.is_server_live(url) and await client.is_server_ready(url)
    assert await client.is_model_ready(url, "ctr")
    return await client.infer(url, request, model_name="ctr")

answer = asyncio.run(ask())
print(json.dumps([answer.id, answer.outputs[0].name, answer.outputs[0].as_numpy().tolist()]))
"""


@pytest.mark.skipif(find_spec("kserve") is None, reason="asks for an older protobuf than Ray Serve: no test dependency")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_client_of_kserve_gets_the_scores_of_the_service(server: Server, rpc: GrpcServer, protocol: str) -> None:
    """`pip install --no-deps --target FOLDER kserve "cloudevents<2" …`, with FOLDER in PYTHONPATH, is enough."""
    kinds = {"i": "INT64", "f": "FP64", "O": "BYTES"}
    sent = [
        (name, kinds[value.dtype.kind], [one.decode() if isinstance(one, bytes) else one for one in value.tolist()])
        for name, value in columns().items()
    ]
    port = str(rpc.port if protocol == "grpc" else server.port)
    words = [sys.executable, "-c", KSERVE, protocol, port]
    done = subprocess.run(words, input=json.dumps(sent), capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    id, label, scores = json.loads(done.stdout.splitlines()[-1])
    told = server.ask("POST", "/score", {"rows": ROWS})[1]
    assert (id, label) == ("mine-2", "label") and scores == pytest.approx(told["scores"]["label"], rel=1e-6)


def test_grpc_answers_health_checks_of_kubernetes(service: Service, tmp_path: Path) -> None:
    """The bytes are those of grpc.health.v1: an empty request, and a status of 1. No token is needed."""
    server = GrpcServer(service, clients_of(tmp_path, one="s3cret"))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            for name in (b"", b"ctr", SERVICE.encode()):
                assert check(bytes([10, len(name)]) + name if name else b"", timeout=30) == bytes([8, 1])
            with pytest.raises(grpc.RpcError) as error:
                check(bytes([10, 4]) + b"none", timeout=30)
            assert error.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    finally:
        server.close()


def test_values_as_json_and_lists_of_equal_length(server: Server, clients: dict[str, tuple[Any, Any]]) -> None:
    rows = [{**row, "tags": [1, 2]} for row in ROWS]
    expected = server.ask("POST", "/score", {"rows": rows})[1]["scores"]["label"]
    values = {name: value for name, value in columns(rows).items() if name != "tags.lengths"}
    values["tags"] = values["tags"].reshape(3, 2)
    module, client = clients["http"]
    plain = [module.InferRequestedOutput("label", binary_data=False)]
    found = client.infer("ctr", inputs(module, values, binary_data=False), outputs=plain)
    assert found.get_response()["outputs"][0]["data"] == expected
    module, client = clients["grpc"]
    assert client.infer("ctr", inputs(module, values)).as_numpy("label").tolist() == np.float32(expected).tolist()


def test_one_row_among_many_is_the_context(server: Server, clients: dict[str, tuple[Any, Any]]) -> None:
    whole = [{**row, "user": 1, "age": 0.5, "tags": [1, 2]} for row in ROWS]
    expected = server.ask("POST", "/score", {"rows": whole})[1]["scores"]["label"]
    one, many = columns(whole[:1]), columns(whole)
    values = {name: (one if name in ("user", "age", "tags", "tags.lengths") else many)[name] for name in many}
    for module, client in clients.values():
        found = client.infer("ctr", inputs(module, values)).as_numpy("label")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_request_has_an_id_of_its_own_or_the_clients(server: Server) -> None:
    for given, expected in (("abc-1", "abc-1"), ("a b", None), ("x" * 200, None)):
        status, _, headers = server.ask_all("POST", "/score", {"rows": [GOOD]}, x_request_id=given)
        assert status == 200 and (headers["x-request-id"] == expected or (expected is None and headers["x-request-id"]))
        assert expected or headers["x-request-id"] not in (given, "")
    assert server.ask_all("GET", "/none", x_request_id="abc-2")[2]["x-request-id"] == "abc-2"


def test_health_is_json_as_the_protocol_has_it(server: Server) -> None:
    assert server.ask("GET", "/v2/health/live") == (200, {"live": True})
    assert server.ask("GET", "/v2/health/ready") == (200, {"ready": True})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("id", ["mine-1", "an id of words", "x" * 300])
def test_an_id_comes_back_through_proxies_that_add_their_own(
    clients: dict[str, tuple[Any, Any]], protocol: str, id: str
) -> None:
    module, client = clients[protocol]
    found = client.infer("ctr", inputs(module, columns()), request_id=id, headers={"x-request-id": "of-a-proxy"})
    response = found.get_response()
    assert (response["id"] if protocol == "http" else response.id) == id


def test_nested_data_must_have_the_shape_of_its_tensor(server: Server) -> None:
    def infer(data: list[Any], shape: list[int]) -> tuple[int, Any]:
        values = {name: value.tolist() for name, value in columns(ROWS[:2]).items() if name != "city"}
        ints = [
            {"name": name, "datatype": "FP64" if name == "age" else "INT64", "shape": [len(value)], "data": value}
            for name, value in values.items()
            if name not in ("tags", "tags.lengths")
        ]
        city = {"name": "city", "datatype": "BYTES", "shape": [2], "data": ["city 1", "city 2"]}
        tags = {"name": "tags", "datatype": "INT64", "shape": shape, "data": data}
        return server.ask("POST", "/v2/models/ctr/infer", {"inputs": [*ints, city, tags]})

    assert infer([[1, 2], [3, 4]], [2, 2])[1]["outputs"] == infer([1, 2, 3, 4], [2, 2])[1]["outputs"]
    for data, shape in (([[1, 2, 3], [4]], [2, 2]), ([[1], [2], [3], [4]], [2, 2]), ([1, [2], 3, 4], [2, 2])):
        assert infer(data, shape)[0] == 422, data


def test_calls_are_refused_before_their_message_is_decoded(service: Service, tmp_path: Path) -> None:
    server = GrpcServer(service, clients_of(tmp_path, one="s3cret"))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for method in ("ModelInfer", "ModelMetadata", "ModelReady"):
                call = channel.unary_unary(f"/{SERVICE}/{method}")
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"\xff" * 100_000)  # no message: decoding it is another error
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as wrong:
                channel.unary_unary(f"/{SERVICE}/ModelInfer")(
                    b"\xff" * 100_000, metadata=[("authorization", "Bearer s3cret")]
                )
            assert wrong.value.code() is not grpc.StatusCode.UNAUTHENTICATED
    finally:
        server.close()


def test_more_calls_at_once_than_the_queue_may_hold_are_refused(model: Path) -> None:
    small = Service([ModelSpec(name="ctr", path=model)], limits=Limits(queue=2))
    server, ended = GrpcServer(small), threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(30)
        yield b""

    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            waiting = [channel.stream_unary(f"/{SERVICE}/ModelInfer").future(never()) for _ in range(4)]
            live = channel.unary_unary(f"/{SERVICE}/ServerLive")

            def refused() -> bool:
                try:
                    live(b"")
                except grpc.RpcError as error:
                    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

            deadline = time.monotonic() + 120
            while not refused():
                assert time.monotonic() < deadline, "calls that wait for their message are not counted"
            ended.set()
            while refused():
                assert time.monotonic() < deadline, "ended calls keep their places"
            assert all(call.exception() is not None for call in waiting)
    finally:
        ended.set()
        server.close()
        small.close()


def test_tokens_and_tls_hold_for_grpc(service: Service, tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    server = GrpcServer(service, clients_of(tmp_path, one="s3cret"), tls)
    options = {"ssl": True, "root_certificates": tls.cert_file}
    client = triton_grpc.InferenceServerClient(f"localhost:{server.port}", **options)
    plain = triton_grpc.InferenceServerClient(f"localhost:{server.port}")
    try:
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer("ctr", inputs(triton_grpc, columns()))
        known = {"authorization": "Bearer s3cret"}
        assert client.infer("ctr", inputs(triton_grpc, columns()), headers=known).as_numpy("label").shape == (3,)
        with pytest.raises(InferenceServerException):
            plain.is_server_live(client_timeout=5)
    finally:
        client.close()
        plain.close()
        server.close()


def certificate(folder: Path) -> TlsConfig:
    """Files of a certificate for localhost, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=localhost")
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return TlsConfig(cert_file=str(folder / "cert.pem"), key_file=str(folder / "key.pem"))


def drawn_request(drawn: random.Random) -> Any:
    """A request with a few faults: other types, shapes, lengths, values and names."""
    request = message("ModelInferRequest")(model_name="ctr")
    for one in inputs(triton_grpc, columns(ROWS[: drawn.randint(1, 3)])):
        request.inputs.add(name=one.name(), datatype=one.datatype(), shape=one.shape())
        request.raw_input_contents.append(one._get_content())
    for _ in range(drawn.randint(0, 3)):
        at = drawn.randrange(len(request.inputs))
        one, kind = request.inputs[at], drawn.randrange(8)
        raw = bytearray(request.raw_input_contents[at])
        if kind == 0:
            one.datatype = drawn.choice([*DTYPES, "BYTES", "", "FP8"])
        elif kind == 1:
            one.shape.append(drawn.choice([0, 1, -1, 2**62]))
        elif kind == 2 and one.shape:
            one.shape[0] = drawn.choice([0, 1, -1, 5, 2**63 - 1])
        elif kind == 3 and len(raw) >= 8:
            raw[-8:] = struct.pack("<q", drawn.choice([-1, 2**62, 10**6]))
        elif kind == 4 and len(raw) >= 8:
            raw[-8:] = struct.pack("<d", drawn.choice([math.nan, math.inf, 1e300]))
        elif kind == 5:
            raw = raw[: drawn.randrange(len(raw) + 1)]
        elif kind == 6:
            one.name = drawn.choice(["", "user", "tags.lengths", "x" * 1000, "\0"])
        elif kind == 7:
            one.contents.int64_contents.append(1)
        request.raw_input_contents[at] = bytes(raw)
    return request


def as_http(request: Any) -> tuple[bytes, dict[str, str]]:
    """The same request as the HTTP protocol has it."""
    entries = [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": list(one.shape),
            "parameters": {"binary_data_size": len(raw)},
        }
        for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    ]
    head = json.dumps({"inputs": entries, "outputs": [{"name": "label"}]}).encode()
    return head + b"".join(request.raw_input_contents), {JSON_LENGTH: str(len(head))}


def test_malformed_requests_are_refused_alike_over_http_and_grpc(server: Server, rpc: GrpcServer) -> None:
    """Never a 5xx, never a crash; what one protocol scores, the other scores with the same numbers."""
    drawn, scored, refused = random.Random(11), 0, 0
    with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
        response = message("ModelInferResponse")
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer", lambda one: one.SerializeToString(), response.FromString)
        for _ in range(400):
            request = drawn_request(drawn)
            body, headers = as_http(request)
            status, answer = server.ask("POST", "/v2/models/ctr/infer", body, **headers)
            try:
                raw = call(request, timeout=30).raw_output_contents[0]
                assert status == 200, (request, answer)
                scores = np.frombuffer(raw, "<f4")
                assert scores.tolist() == np.float32(answer["outputs"][0]["data"]).tolist()
                assert ((scores >= 0) & (scores <= 1)).all()
                scored += 1
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (error, request)
                assert 400 <= status < 500 and error.details() == answer["error"][:1000], (error, answer)
                refused += 1
    assert scored > 80 and refused > 150, (scored, refused)


def test_malformed_bodies_and_frames_are_refused(server: Server, rpc: GrpcServer) -> None:
    drawn = random.Random(3)
    for _ in range(300):
        body, headers = as_http(drawn_request(random.Random(1)))
        spoiled = bytearray(body)
        for _ in range(drawn.randint(1, 4)):
            spoiled[drawn.randrange(int(headers[JSON_LENGTH]))] = drawn.choice(b'0"[]{}-,:x\xff')
        if drawn.random() < 0.2:
            headers[JSON_LENGTH] = drawn.choice(["-1", "x", "999999", "0", "10"])
        status, answer = server.ask("POST", "/v2/models/ctr/infer", bytes(spoiled), **headers)
        assert status == 200 or (400 <= status < 500 and answer["error"]), (status, answer, spoiled)
    for path, status in (("/v2", 200), ("/v2/models/ctr/versions/v0", 404), ("/v2/models/none/infer", 404)):
        assert server.ask("POST" if "infer" in path else "GET", path, b'{"inputs": []}')[0] == status
    with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(200):
            with pytest.raises(grpc.RpcError) as refused:
                call(drawn.randbytes(drawn.randint(1, 60)), timeout=30)
            assert refused.value.code() is not grpc.StatusCode.UNAVAILABLE
        assert call(drawn_ok().SerializeToString(), timeout=30)


def drawn_ok() -> Any:
    request = message("ModelInferRequest")(model_name="ctr")
    for one in inputs(triton_grpc, columns()):
        request.inputs.add(name=one.name(), datatype=one.datatype(), shape=one.shape())
        request.raw_input_contents.append(one._get_content())
    return request


@pytest.mark.parametrize("kind", ["double", "number", "float32", "float16", "decimal"])
def test_inputs_are_the_columns_that_derived_ones_are_made_of(kind: str) -> None:
    schema = Schema.model_validate(
        {
            "sparse": [{"name": "price_id", "column": "price_bucket"}, {"name": "user"}],
            "derived": [{"kind": "buckets", "name": "price_bucket", "column": "price", "boundaries": [1.0, 5.0]}],
            "column_types": {"price": kind},
        }
    )
    found = {one["name"]: one["datatype"] for one in inputs_of(schema)}
    assert found == {"price": "FP64", "user": "INT64"}
    tensors = [tensor_of("price", "FP64", [2], [0.5, 7.0]), tensor_of("user", "INT64", [2], [1, 2])]
    query = query_of(tensors, schema, Limits())
    assert query.size == 2 and query.rows.to_pydict() == {"price": [0.5, 7.0], "user": [1, 2]}


def test_each_type_of_a_column_has_its_datatype() -> None:
    types = {"t": "text", "i": "integer", "b": "boolean", "l": "list<float32>", "at": "time", "m": "map<text, number>"}
    found = {one["name"]: one["datatype"] for one in inputs_of(Schema(column_types=types, dense=[{"name": "x"}]))}
    assert found == {"t": "BYTES", "i": "INT64", "b": "BOOL", "l": "FP64", "l.lengths": "INT64", "x": "FP64"}
