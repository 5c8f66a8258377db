"""gRPC messages of the open inference protocol, as its `grpc_predict_v2.proto` defines them.

Source: https://github.com/kserve/open-inference-protocol. The messages are built on import from the table below, in a
separate descriptor pool: another package in the process may register the same definitions.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE, SERVICE, HEALTH = "inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"

# message → its fields in the order of their numbers. "*": repeated; capitalized type: a message of this table; "-": a
# field that the server neither reads nor writes, which protobuf ignores
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, *string extensions",
    "ModelMetadataRequest": "string name, string version",
    "TensorMetadata": "string name, string datatype, *int64 shape",
    "ModelMetadataResponse": "string name, *string versions, string platform, *TensorMetadata inputs, "
    "*TensorMetadata outputs",
    "InferTensorContents": "*bool bool_contents, *int32 int_contents, *int64 int64_contents, *uint32 uint_contents, "
    "*uint64 uint64_contents, *float fp32_contents, *double fp64_contents, *bytes bytes_contents",
    "InferInputTensor": "string name, string datatype, *int64 shape, - parameters, InferTensorContents contents",
    "InferRequestedOutputTensor": "string name, - parameters",
    "ModelInferRequest": "string model_name, string model_version, string id, - parameters, *InferInputTensor inputs, "
    "*InferRequestedOutputTensor outputs, *bytes raw_input_contents",
    "InferOutputTensor": "string name, string datatype, *int64 shape, - parameters, - contents",
    # of grpc.health.v1: a status is an enum there, which has the same bytes
    "HealthCheckRequest": "string service",
    "HealthCheckResponse": "int32 status",
    "ModelInferResponse": "string model_name, string model_version, string id, - parameters, "
    "*InferOutputTensor outputs, *bytes raw_output_contents",
}
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message: Any, number: int, kind: str, name: str) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[1:]
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="rayrec_open_inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(filter(None, fields.split(", ")), 1):
            if not field.startswith("-"):
                _add_field(message, number, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
