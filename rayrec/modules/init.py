"""Initial weights that do not depend on how a table is sharded.

A table is filled in blocks of rows, each from a seed of (seed, table, block). A shard computes the blocks that it
touches and keeps its rectangle, so that every plan and world size starts from the same numbers, and a rank holds at
most its shard and one block.
"""

from __future__ import annotations

import zlib

import torch

from rayrec.modules.configs import BaseEmbeddingConfig

BLOCK_ELEMENTS = 1 << 20


def block_rows(dim: int) -> int:
    """Rows per block of about a million numbers."""
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
        out: `[rows, cols]` of any float data type, written in place.
        config: The table. Its `init_fn` fills a block of rows `[n, embedding_dim]`; default: uniform.
        seed: Seed of the collection.
        rows, cols: Half-open ranges. Default: all rows, all columns.
    """
    dim = config.embedding_dim
    first_row, last_row = rows or (0, config.num_embeddings)
    first_col, last_col = cols or (0, dim)
    step = block_rows(dim)
    buffer: torch.Tensor | None = None
    with torch.no_grad():
        for block in range(first_row // step, -(-last_row // step)):
            start, stop = block * step, min((block + 1) * step, config.num_embeddings)
            a, b = max(first_row, start), min(last_row, stop)
            block_out = out[a - first_row : b - first_row]
            if (
                block_out.shape == (stop - start, dim)
                and block_out.dtype == torch.float32
                and block_out.is_contiguous()
            ):
                _fill_block(block_out, config, seed, block)
                continue
            if buffer is None:
                buffer = torch.empty(min(step, config.num_embeddings), dim, device=out.device)
            numbers = buffer[: stop - start]
            _fill_block(numbers, config, seed, block)
            block_out.copy_(numbers[a - start : b - start, first_col:last_col])


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
