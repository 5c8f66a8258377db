"""The container of a checkpoint's numbers: safetensors.

A length, a JSON header with names, number formats, shapes and places, then raw numbers in row-major order. It fits
because all of that is known before the first number is written, so a file is written in one pass, and readers exist in
every language. It has no checksums and knows no pieces of larger tensors: those are in the index (`index.py`), which
has a checksum of this header too. The format is a page long (huggingface.co/docs/safetensors), so it is written here
without the package; its own reader is what the tests hold the files against.
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
    """What stands before the numbers of tensors given as (name, number format, shape), which follow without gaps.

    Raises:
        ValueError: a number format that safetensors does not know.
    """
    named, begin = {}, 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise ValueError(f"{name}: numbers of {dtype} cannot be saved; use one of {list(NAMES.values())}")
        end = begin + math.prod(shape) * dtype.itemsize
        named[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(named, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers lie at multiples of eight bytes
    return len(text).to_bytes(8, "little") + text


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The numbers as they lie in memory; copied only where they are not in host memory, one beside the other."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
