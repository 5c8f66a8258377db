"""How headers and parts get from rank to rank on CPUs: by one exchange where parts fit what is foreseen, else by two.

For each pair of ranks some words travel with the header, filled or not. Both ends derive how many from the headers of
earlier batches, so that nobody has to be told how much will come. A part that does not fit is left out, every header of
its rank says so, and all ranks meet for a second exchange. See `gpu_transport` for the way between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.buffers import BufferPool
from rayrec.distributed.ids.message import OVER, WORD, Headers, Ids, as_words, ids_from, part_sizes, to_pieces

LEAST_SPARE, MOST_SPARE = 64, 1 << 14  # words


class IdTransport:
    """The way of one collection's ids.

    Args:
        group: joins the ranks.
        rank: of this process.
        streams: how many streams each rank receives of every rank.
        weighted: ids carry weights.
    """

    def __init__(self, group: comm.Group, rank: int, streams: Sequence[int], weighted: bool) -> None:
        self.group, self.weighted = group, weighted
        self.streams, self.own_streams = list(streams), [streams[rank]] * len(streams)
        self.buffers = BufferPool(torch.device("cpu"))
        self.foreseen_out = self.foreseen_in = [0] * len(streams)  # words that travel with the header, by rank

    def start(self, header_WH: torch.Tensor, mine: Ids) -> Delivery:
        """Begins to send.

        Args:
            header_WH: int64, a row for each rank.
            mine: this rank's streams of rank 0, then of rank 1 …
        """
        return Delivery(self, header_WH, mine)

    def learn(self, words_out: Sequence[int], words_in: Sequence[int]) -> None:
        """Foresees parts like these. Every rank learns from the same exchanges in the same order."""
        self.foreseen_out = list(map(_foreseen, self.foreseen_out, words_out))
        self.foreseen_in = list(map(_foreseen, self.foreseen_in, words_in))


def _foreseen(before: int, words: int) -> int:
    """Somewhat more than was needed, and shrinking slowly: a few small batches between others cost nothing."""
    spare = min(max(words // 8, LEAST_SPARE), MOST_SPARE) if words else 0
    return max(words + spare, before - before // 64) // 2 * 2


class Delivery:
    """One batch on its way: `headers` first, then `ids`."""

    def __init__(self, transport: IdTransport, header_WH: torch.Tensor, mine: Ids) -> None:
        self._transport, self._header_WH = transport, header_WH
        sizes = part_sizes(header_WH.tolist(), transport.streams, transport.weighted)
        pieces, self._words_out = iter(to_pieces(mine, sizes)), list(map(sum, sizes))
        self._parts = [list(islice(pieces, len(of_part))) for of_part in sizes]
        self._late_out = list(map(int.__gt__, self._words_out, transport.foreseen_out))
        header_WH[:, OVER] = any(self._late_out)
        self._foreseen_in, self._header_words = transport.foreseen_in, 2 * header_WH.shape[1]
        self._splits_in = [words + self._header_words for words in transport.foreseen_in]
        splits_out = [words + self._header_words for words in transport.foreseen_out]
        self._arrived = transport.buffers.empty(sum(self._splits_in), WORD)
        self._wait = comm.all_to_all(self._arrived, self._first(), self._splits_in, splits_out, transport.group)

    def _first(self) -> torch.Tensor:
        """Headers, each with its part behind it where it fits, and what is left of what was foreseen."""
        foreseen, late_out = self._transport.foreseen_out, self._late_out
        empty = self._transport.buffers.empty(max(foreseen), WORD)
        message: list[torch.Tensor] = []
        of_ranks = zip(self._header_WH.unbind(), late_out, foreseen, self._words_out, self._parts, strict=True)
        for header, late, room, words, part in of_ranks:
            message += [as_words(header), *([] if late else part), empty[: room if late else room - words]]
        return self._joined(message)

    def headers(self) -> Headers:
        """Every rank's header for this one."""
        self._wait()
        rows = torch.cat([early[: self._header_words] for early in self._arrived.split(self._splits_in)])
        self._received: Headers = rows.view(torch.int64).view(self._header_WH.shape).tolist()
        return self._received

    def ids(self) -> Ids:
        """Every rank's ids for this rank, once headers are there: lists rank after rank, stream after stream."""
        transport = self._transport
        sizes = part_sizes(self._received, transport.own_streams, transport.weighted)
        words = list(map(sum, sizes))
        bodies = [early[self._header_words :] for early in self._arrived.split(self._splits_in)]
        if any(header[OVER] for header in self._received):
            late_in = list(map(int.__gt__, words, self._foreseen_in))
            pairs = zip(bodies, self._second(list(map(int.__mul__, words, late_in))), late_in, strict=True)
            bodies = [second if late else first for first, second, late in pairs]
        transport.learn(self._words_out, words)
        split = (body[: sum(of_rank)].split(of_rank) for body, of_rank in zip(bodies, sizes, strict=True))
        return ids_from([piece for part in split for piece in part], transport.weighted)

    def _second(self, splits_in: list[int]) -> Sequence[torch.Tensor]:
        """What did not fit, by rank."""
        late, splits_out = self._late_out, list(map(int.__mul__, self._words_out, self._late_out))
        message = self._joined([piece for part in compress(self._parts, late) for piece in part])
        arrived = self._transport.buffers.empty(sum(splits_in), WORD)
        comm.all_to_all(arrived, message, splits_in, splits_out, self._transport.group)()
        return arrived.split(splits_in)

    def _joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        buffer = self._transport.buffers.empty(sum(piece.numel() for piece in pieces), WORD)
        return torch.cat(list(pieces), out=buffer) if pieces else buffer
