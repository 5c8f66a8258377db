"""One rank's part of an epoch of a mix: a `BatchStream` of each data set, their rows joined to one batch a step."""

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
    """Iterates over this rank's part of what is left of the cursor's epoch, as `BatchStream` does.

    Over all ranks every row of the data set that lasts longest comes once, and those of the others in whole passes and
    the beginning of one more. A batch has the rows of each data set beside each other, at its share; the last batch of
    the epoch may have fewer rows of the longest.

    Args:
        mix: the data sets, the same on every rank.
        batch_rows: rows of a batch of all ranks together.
        Others as for `BatchStream`.

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
        if cursor.parts and cursor.parts[mix.longest].over:  # nothing of the others is read either
            starts = [Cursor.start(cursor.epoch) if number != mix.longest else one for number, one in enumerate(starts)]
        self._schema, self._batch_rows, self._longest = schema, batch_rows, mix.longest
        mean = [dealt(batch_rows, rank, world_size) * weight / sum(mix.weights) for weight in mix.weights]

        def steps() -> Iterator[list[int]]:
            return batch_shares(mix.weights, cursor.given, batch_rows, rank, world_size)

        def sizes(number: int) -> Iterator[int]:
            return (step[number] for step in steps() if step[number])

        self._open = ExitStack()
        self._parts: list[BatchStream] = []
        with ExitStack() as opening:  # what is open ends with the first that cannot be
            for number, (manifest, part) in enumerate(zip(mix.parts, starts, strict=True)):
                stream = BatchStream(
                    manifest,
                    schema,
                    rows_of,
                    batch_rows=mean[number],
                    rank=rank,
                    world_size=world_size,
                    cursor=part,
                    seed=seed,
                    interleave=interleave,
                    options=options,
                    sizes=sizes(number),
                    passes=mix.passes(number, world_size, options.bad_rows.policy == "skip"),
                )
                self._parts.append(opening.enter_context(stream))
            self._open = opening.pop_all()
        self._steps = steps()
        self._skipped, self._sampled = Skipped(), [0] * len(self._parts)
        self._cursors, self._rows_given = [part.start_cursor for part in self._parts], cursor.given
        self.start_cursor = Cursor.join(self._cursors, cursor.given)

    def __next__(self) -> Item:
        longest = self._parts[self._longest]
        while not longest.over:
            batch = self._step(next(self._steps))
            if batch.rows or longest.over:
                return batch, Cursor.join(self._cursors, self._rows_given)
        raise StopIteration

    def _step(self, rows: Sequence[int]) -> Batch:
        """The parts of one batch together; a data set that a rank's part ran out of lacks in it."""
        batches = []
        for number, stream in enumerate(self._parts):
            found = next(stream, None) if rows[number] else None
            if number == self._longest and rows[number] and found is None:
                raise StopIteration  # closed
            if found is not None:
                batch, self._cursors[number] = found
                batches.append(batch)
        self._rows_given += self._batch_rows
        return joined(batches) if batches else empty_batch(self._schema)

    @property
    def skipped(self) -> Skipped:
        """What was left out of any data set; samples keep their places in the list."""
        skipped = self._skipped
        skipped.count = sum(part.skipped.count for part in self._parts)
        for number, part in enumerate(self._parts):
            new = part.skipped.samples[self._sampled[number] :]
            skipped.samples += new
            self._sampled[number] += len(new)
        return skipped

    @property
    def share_given(self) -> float:
        """Of the rows of the longest data set read so far, those that came in batches."""
        return self._parts[self._longest].share_given

    @property
    def batches_left(self) -> int:
        """How many batches are to come, as far as that is known."""
        return self._parts[self._longest].batches_left

    def close(self) -> None:
        """Ends reading; safe to call twice and in the middle."""
        self._open.close()

    def __enter__(self) -> MixedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def joined(batches: Sequence[Batch]) -> Batch:
    """The examples of all batches, in order."""
    if len(batches) == 1:
        return batches[0]
    targets: dict[str, Any] = {}
    for name in (field.name for field in fields(Batch) if field.name not in ("sparse", "layout", "lists")):
        parts = [getattr(batch, name) for batch in batches]
        targets[name] = None if parts[0] is None else torch.cat(parts)
    lists = {name: torch.cat([batch.lists[name] for batch in batches]) for name in batches[0].lists}
    sparse = _joined([batch.sparse for batch in batches])
    return Batch(sparse=sparse, layout=batches[0].layout, lists=lists, **targets)


def _joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Along the examples; `KeyedJaggedTensor.concat` joins keys."""
    keys = parts[0].keys()
    jagged = [part.to_dict() for part in parts]
    each = [features[key] for key in keys for features in jagged]
    weighted = parts[0].weights_or_none() is not None
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([one.values() for one in each]),
        weights=torch.cat([one.weights() for one in each]) if weighted else None,
        lengths=torch.cat([one.lengths() for one in each]),
        stride=sum(part.stride() for part in parts),
    )
