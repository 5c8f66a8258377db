"""`MixedStream`: a rank's share of an epoch of a mix. Joins the batches of one `BatchStream` per data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch

from rayrec.data.config import ReadOptions
from rayrec.data.mapping.collate import empty_batch
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.cursor import Cursor
from rayrec.data.order.epoch import dealt
from rayrec.data.order.mix import Mix, batch_shares
from rayrec.data.stream.batch_stream import BatchStream, Item
from rayrec.data.stream.batching import Skipped
from rayrec.models.batch import Batch
from rayrec.sparse import KeyedJaggedTensor


class MixedStream(Iterator[Item]):
    """Iterates over this rank's share of the rest of the cursor's epoch, like `BatchStream`.

    Over all ranks, every row of the longest data set occurs once; the others repeat. A batch has rows of each data set
    in proportion to its weight, grouped by data set. The last batch of the epoch may have fewer rows of the longest.
    Arguments that are not listed are those of `BatchStream`.

    Args:
        mix: the data sets, the same on every rank.
        batch_rows: rows of a global batch.

    Raises:
        DataError: as `BatchStream`.
    """

    def __init__(
        self,
        mix: Mix,
        schema: Schema,
        rows_of: Mapping[str, int],
        *,
        batch_rows: int,
        rank: int,
        world_size: int,
        cursor: Cursor,
        seed: int,
        interleave: int = 1,
        options: ReadOptions | None = None,
    ) -> None:
        starts, options = cursor.split(len(mix.parts)), options or ReadOptions()
        if cursor.parts and cursor.parts[mix.longest].over:  # then the others are not read either
            starts = [
                Cursor.start(cursor.epoch) if number != mix.longest else start for number, start in enumerate(starts)
            ]
        self._schema, self._batch_rows, self._longest = schema, batch_rows, mix.longest
        mean = [dealt(batch_rows, rank, world_size) * weight / sum(mix.weights) for weight in mix.weights]

        def steps() -> Iterator[list[int]]:
            return batch_shares(mix.weights, cursor.given, batch_rows, rank, world_size)

        def sizes(number: int) -> Iterator[int]:
            return (step[number] for step in steps() if step[number])

        self._open = ExitStack()
        self._streams: list[BatchStream] = []
        with ExitStack() as opening:  # closes the open streams if one cannot be opened
            for number, (manifest, stream_start) in enumerate(zip(mix.parts, starts, strict=True)):
                stream = BatchStream(
                    manifest,
                    schema,
                    rows_of,
                    batch_rows=mean[number],
                    rank=rank,
                    world_size=world_size,
                    cursor=stream_start,
                    seed=seed,
                    interleave=interleave,
                    options=options,
                    sizes=sizes(number),
                    passes=mix.passes(number, world_size, options.bad_rows.policy == "skip"),
                )
                self._streams.append(opening.enter_context(stream))
            self._open = opening.pop_all()
        self._steps = steps()
        self._skipped, self._sampled = Skipped(), [0] * len(self._streams)
        self._cursors, self._rows_given = [stream_start.start_cursor for stream_start in self._streams], cursor.given
        self.start_cursor = Cursor.join(self._cursors, cursor.given)

    def __next__(self) -> Item:
        longest = self._streams[self._longest]
        while not longest.over:
            batch = self._step(next(self._steps))
            if batch.rows or longest.over:
                return batch, Cursor.join(self._cursors, self._rows_given)
        raise StopIteration

    def _step(self, rows: Sequence[int]) -> Batch:
        """Joins one batch. Exhausted data sets are missing in it."""
        batches = []
        for number, stream in enumerate(self._streams):
            item = next(stream, None) if rows[number] else None
            if number == self._longest and rows[number] and item is None:
                raise StopIteration  # closed
            if item is not None:
                batch, self._cursors[number] = item
                batches.append(batch)
        self._rows_given += self._batch_rows
        return joined(batches) if batches else empty_batch(self._schema)

    @property
    def skipped(self) -> Skipped:
        """Skipped rows of all data sets. Samples are only appended."""
        skipped = self._skipped
        skipped.count = sum(part.skipped.count for part in self._streams)
        for number, part in enumerate(self._streams):
            new = part.skipped.samples[self._sampled[number] :]
            skipped.samples += new
            self._sampled[number] += len(new)
        return skipped

    @property
    def share_given(self) -> float:
        """Fraction of the rows of the longest data set read so far that were in batches."""
        return self._streams[self._longest].share_given

    @property
    def batches_left(self) -> int:
        """Number of remaining batches; an estimate if rows are skipped."""
        return self._streams[self._longest].batches_left

    def close(self) -> None:
        """Ends reading. May be called at any time, and repeatedly."""
        self._open.close()

    def __enter__(self) -> MixedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches."""
    if len(batches) == 1:
        return batches[0]
    targets: dict[str, Any] = {}
    for name in (field.name for field in fields(Batch) if field.name not in ("sparse", "layout", "lists")):
        tensors = [getattr(batch, name) for batch in batches]
        targets[name] = None if tensors[0] is None else torch.cat(tensors)
    lists = {name: torch.cat([batch.lists[name] for batch in batches]) for name in batches[0].lists}
    sparse = _joined([batch.sparse for batch in batches])
    return Batch(sparse=sparse, layout=batches[0].layout, lists=lists, **targets)


def _joined(tensors: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Concatenates samples; `KeyedJaggedTensor.concat` concatenates keys."""
    keys = tensors[0].keys()
    jagged = [kjt.to_dict() for kjt in tensors]
    features_in_order = [features[key] for key in keys for features in jagged]
    weighted = tensors[0].weights_or_none() is not None
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([jagged_tensor.values() for jagged_tensor in features_in_order]),
        weights=torch.cat([jagged_tensor.weights() for jagged_tensor in features_in_order]) if weighted else None,
        lengths=torch.cat([jagged_tensor.lengths() for jagged_tensor in features_in_order]),
        stride=sum(kjt.stride() for kjt in tensors),
    )
