"""Initial weights that do not depend on how a table is sharded.

A table is filled in blocks of whole rows, each from its own seed (seed, table, block). A shard makes the blocks that it
touches and keeps its part, so every plan on every world size starts from the same numbers, and no rank ever holds more
than its shard and one block.
"""

from __future__ import annotations

import zlib

import torch

from rayrec.modules.configs import BaseEmbeddingConfig

BLOCK_ELEMENTS = 1 << 20


def block_rows(dim: int) -> int:
    """Rows of a block: about a million numbers."""
    return max(1, BLOCK_ELEMENTS // dim)


def fill(
    out: torch.Tensor,
    config: BaseEmbeddingConfig,
    seed: int,
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
) -> None:
    """Fills `out` with the initial weights of a rectangle of the table.

    Args:
        out: `[rows, cols]` of any float dtype, written in place.
        config: the table; its `init_fn` fills a block of rows `[n, embedding_dim]`; without one they are uniform.
        seed: of the collection.
        rows, cols: half-open ranges; the whole table by default.
    """
    dim = config.embedding_dim
    first, last = rows or (0, config.num_embeddings)
    left, right = cols or (0, dim)
    step = block_rows(dim)
    buffer: torch.Tensor | None = None
    with torch.no_grad():
        for block in range(first // step, -(-last // step)):
            start, stop = block * step, min((block + 1) * step, config.num_embeddings)
            a, b = max(first, start), min(last, stop)
            part = out[a - first : b - first]
            if part.shape == (stop - start, dim) and part.dtype == torch.float32 and part.is_contiguous():
                _fill_block(part, config, seed, block)
                continue
            if buffer is None:
                buffer = torch.empty(min(step, config.num_embeddings), dim, device=out.device)
            numbers = buffer[: stop - start]
            _fill_block(numbers, config, seed, block)
            part.copy_(numbers[a - start : b - start, left:right])


def _fill_block(numbers: torch.Tensor, config: BaseEmbeddingConfig, seed: int, block: int) -> None:
    block_seed = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(config.name.encode()) * 0x100000001B3 + block) % (1 << 63)
    device = numbers.device
    if config.init_fn is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        numbers.uniform_(low, high, generator=torch.Generator(device).manual_seed(block_seed))
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(block_seed)
        config.init_fn(numbers)
