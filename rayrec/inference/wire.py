"""A mapped batch as bytes: what the C++ server takes (`deploy/cpp/server.cpp`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayrec.inference.graph import Inputs, arguments
from rayrec.models import Batch


def to_bytes(batch: Batch, inputs: Inputs) -> bytes:
    """Little endian: int64 B, int64 n, float32 dense [B, N], int64 offsets [F * B + 1], int64 ids [n], and float32
    weights [n] where the model's ids have weights. The batch's keys are in the model's order.
    """
    dense, ids, offsets, _, *weights = arguments(batch, replace(inputs, context=None), batch.dense)
    sizes = np.array([batch.rows, len(ids)], "<i8").tobytes()
    parts = [(dense, "<f4"), (offsets, "<i8"), (ids, "<i8"), *((weight, "<f4") for weight in weights)]
    return sizes + b"".join(tensor.contiguous().numpy().astype(kind, copy=False).tobytes() for tensor, kind in parts)
