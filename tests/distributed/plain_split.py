"""Splits a batch's ids by the ranks that hold their rows, with torch's operators: the oracle of the compiled loops."""

from __future__ import annotations

import torch

from rayrec.distributed.ids.batch import GROUPS, NUMBER, VALUES, Ids, OutgoingIds
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor


def plain_split(routes: Routes, kjt: KeyedJaggedTensor, weighted: bool, traced: bool) -> OutgoingIds:
    """The first batch of a sender, by selecting the ids of each stream in turn.

    Args:
        routes: routes of the collection.
        kjt: every feature of the routes, and maybe others; on the host.
        weighted: whether ids carry weights.
        traced: whether to record the origin of each id.
    """
    index, batch, ends = kjt.index_per_key(), kjt.stride(), kjt.offset_per_key()
    values, bags = kjt.values().to(torch.int64), torch.arange(batch)
    lengths_KB = kjt.lengths().view(len(kjt.keys()), batch).to(torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    lengths, ids, numbers = [lengths_KB[:0]], [empty], [empty]
    header = torch.zeros(len(routes.ranks), GROUPS + routes.num_groups, dtype=torch.int64)
    header[:, 1], header[:, NUMBER] = batch, 1
    for rank, route in enumerate(routes.ranks):
        sizes = []
        for stream in route.streams:
            variant = routes.variants[stream.variant]
            key = index[variant.feature]
            number, low, lengths_B = torch.arange(ends[key], ends[key + 1]), 0, lengths_KB[key]
            if variant.edges is not None:
                low, high = variant.edges[stream.bucket : stream.bucket + 2]
                inside = (values[number] >= low) & (values[number] < high)
                bag_N = bags.repeat_interleave(lengths_B, output_size=number.numel())
                number, lengths_B = number[inside], bag_N[inside].bincount(minlength=batch)
            lengths.append(lengths_B[None])
            ids.append(values[number] - low)
            numbers.append(number)
            sizes.append(number.numel())
        header[rank, VALUES] = sum(sizes)
        for lookup in route.lookups:
            header[rank, GROUPS + lookup.group] += sizes[lookup.stream]
    lengths_SB, origins = torch.cat(lengths), torch.cat(numbers)
    weights = kjt.weights()[origins] if weighted else None
    split = Ids(lengths_SB, torch.cat(ids), weights)
    if not traced:
        return OutgoingIds(split, header)
    key_F = [index[feature] for feature in routes.features]
    sizes_F = lengths_KB[key_F].sum(1)
    shift_K = torch.zeros(len(kjt.keys()), dtype=torch.int64)
    shift_K[key_F] = sizes_F.cumsum(0) - sizes_F - torch.tensor(ends)[key_F]
    origins = origins + shift_K.repeat_interleave(lengths_KB.sum(1))[origins]
    return OutgoingIds(split, header, lengths_FB=lengths_KB[key_F], origins=origins)
