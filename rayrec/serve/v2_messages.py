"""Messages of the open inference protocol over gRPC, as its published `grpc_predict_v2.proto` defines them.

Source: https://github.com/kserve/open-inference-protocol. They are built from this table on import, in
a pool of their own: another package's copy of the same definition may be in the process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE, SERVICE = "inference", "inference.GRPCInferenceService"
_PARAMETERS = "map InferParameter"

# message → fields in the order of their numbers; "*" is repeated, a capital letter a message of this table
MESSAGES: dict[str, dict[str, str]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": "bool"},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": "bool"},
    "ModelReadyRequest": {"name": "string", "version": "string"},
    "ModelReadyResponse": {"ready": "bool"},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": "string", "version": "string", "extensions": "*string"},
    "ModelMetadataRequest": {"name": "string", "version": "string"},
    "ModelMetadataResponse.TensorMetadata": {"name": "string", "datatype": "string", "shape": "*int64"},
    "ModelMetadataResponse": {
        "name": "string",
        "versions": "*string",
        "platform": "string",
        "inputs": "*ModelMetadataResponse.TensorMetadata",
        "outputs": "*ModelMetadataResponse.TensorMetadata",
    },
    "InferParameter": {"bool_param": "bool", "int64_param": "int64", "string_param": "string"},
    "InferTensorContents": {
        "bool_contents": "*bool",
        "int_contents": "*int32",
        "int64_contents": "*int64",
        "uint_contents": "*uint32",
        "uint64_contents": "*uint64",
        "fp32_contents": "*float",
        "fp64_contents": "*double",
        "bytes_contents": "*bytes",
    },
    "ModelInferRequest.InferInputTensor": {
        "name": "string",
        "datatype": "string",
        "shape": "*int64",
        "parameters": _PARAMETERS,
        "contents": "InferTensorContents",
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": "string", "parameters": _PARAMETERS},
    "ModelInferRequest": {
        "model_name": "string",
        "model_version": "string",
        "id": "string",
        "parameters": _PARAMETERS,
        "inputs": "*ModelInferRequest.InferInputTensor",
        "outputs": "*ModelInferRequest.InferRequestedOutputTensor",
        "raw_input_contents": "*bytes",
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": "string",
        "datatype": "string",
        "shape": "*int64",
        "parameters": _PARAMETERS,
        "contents": "InferTensorContents",
    },
    "ModelInferResponse": {
        "model_name": "string",
        "model_version": "string",
        "id": "string",
        "parameters": _PARAMETERS,
        "outputs": "*ModelInferResponse.InferOutputTensor",
        "raw_output_contents": "*bytes",
    },
}
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message: Any, name: str, kind: str, number: int, full_name: str) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map "):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "string", 1, f"{full_name}.{entry.name}")
        _add_field(entry, "value", kind.removeprefix("map "), 2, f"{full_name}.{entry.name}")
        kind = f"*{full_name}.{entry.name}"
    if kind.startswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[1:]
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="rayrec_open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for full_name in sorted(MESSAGES, key=lambda name: name.count(".")):
        outer, _, name = full_name.rpartition(".")
        message = made[outer].nested_type.add(name=name) if outer else file.message_type.add(name=name)
        made[full_name] = message
        for number, (field, kind) in enumerate(MESSAGES[full_name].items(), 1):
            _add_field(message, field, kind, number, full_name)
    choice = made["InferParameter"]
    choice.oneof_decl.add(name="parameter_choice")
    for field in choice.field:
        field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
