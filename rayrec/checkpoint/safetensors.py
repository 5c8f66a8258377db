"""The file format of a checkpoint's numbers: safetensors.

A file has a length, a JSON header with names, number formats, shapes and byte offsets, then raw numbers in row-major
order. All of that is known before the first number is written, so a file is written in one pass, and readers exist for
every language. The format has no checksums and no tensors in several rectangles: those are in the index (`index.py`),
which also has a checksum of this header. The format is a page long (huggingface.co/docs/safetensors), so it is
implemented here; tests read the files with the safetensors package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The bytes of a file before its numbers, which follow without gaps.

    Args:
        tensors: (name, number format, shape) of each tensor, in the order of their numbers.

    Raises:
        ValueError: a number format that safetensors does not support.
    """
    entries, begin = {}, 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise ValueError(f"{name}: cannot save numbers of {dtype}; use one of {list(NAMES.values())}")
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers to 8 bytes
    return len(text).to_bytes(8, "little") + text


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The numbers in row-major order; a copy only if the tensor is on a device or not contiguous."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
