"""Attention over jagged rows: formulas spelled out, causality, buckets, masks, empty rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules import attention
from rayrec.modules.attention import Layout
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder, HSTULayer
from rayrec.modules.positions import Positions, RelativeBias

LENGTHS = [5, 0, 1, 17, 9, 2]
DIM = 8


def rows(lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, offsets, times that rise within a row)."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(int(offsets[-1]), DIM, generator=generator)
    times = torch.randint(1, 5000, (len(values),), generator=generator).cumsum(0)
    return values, offsets, times


def encoder(kind: str, causal: bool = True) -> nn.Module:
    torch.manual_seed(3)
    if kind == "hstu":
        return HSTUEncoder(HSTUConfig(dim=DIM, max_length=20, heads=2, qk_dim=3, use_times=True, causal=causal))
    return TransformerEncoder(EncoderConfig(dim=DIM, heads=2, hidden=12, norm_first=kind == "pre", causal=causal))


def hstu_row(layer: HSTULayer, x: torch.Tensor, times: torch.Tensor, causal: bool) -> torch.Tensor:
    """Meta's formula for one row, position by position."""
    bias = layer.bias
    normed = F.layer_norm(x, (DIM,), layer.norm.weight, layer.norm.bias, 1e-6)
    mixed = normed @ layer.uvqk.weight.T
    mixed = mixed / (1 + torch.exp(-mixed))
    u, v, q, k = mixed.split(layer.widths, dim=1)
    out = torch.zeros_like(v)
    for head in range(layer.heads):
        of_qk = slice(head * layer.qk_dim, (head + 1) * layer.qk_dim)
        of_v = slice(head * layer.v_dim, (head + 1) * layer.v_dim)
        for i in range(len(x)):
            asked = times[i + 1] if i + 1 < len(x) else times[i]
            for j in range(len(x)):
                if causal and j > i:
                    continue
                score = q[i, of_qk] @ k[j, of_qk] / layer.qk_dim**0.5 + bias.by_distance[j - i + layer.N - 1]
                bucket = int(math.log(max(1, abs(int(asked - times[j])))) / 0.301)
                score = score + bias.by_time[min(bucket, 128)]
                out[i, of_v] += score * torch.sigmoid(score) / layer.N * v[j, of_v]
    gated = F.layer_norm(out, (out.shape[1],), layer.norm_attended.weight, layer.norm_attended.bias, 1e-6) * u
    return x + gated @ layer.out.weight.T + layer.out.bias


def check_hstu_formula() -> None:
    values, offsets, times = rows()
    for causal in (True, False):
        layer = encoder("hstu", causal).layers[0]
        nn.init.normal_(layer.bias.by_distance)  # as large as scores
        found = layer(values, Layout(offsets, times))
        for row in range(len(LENGTHS)):
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            if LENGTHS[row]:
                want = hstu_row(layer, values[part], times[part], causal)
                torch.testing.assert_close(found[part], want, rtol=1e-5, atol=1e-5)


def test_hstu_is_metas_formula() -> None:
    check_hstu_formula()


def test_candidates_of_a_row_are_as_in_a_row_of_their_own() -> None:
    """With times: of events until the request, and the time of the request for each candidate."""
    values, offsets, times = rows()
    layer = encoder("hstu").layers[0]
    nn.init.normal_(layer.bias.by_distance)
    candidates = torch.tensor([min(length, 3) for length in LENGTHS])
    for row, length in enumerate(LENGTHS):
        items = length - int(candidates[row])
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        times[part][items:] = times[part][items:].max() if length else 0
    found = layer(values, Layout(offsets, times, items=torch.tensor(LENGTHS) - candidates))
    for row, length in enumerate(LENGTHS):
        start, items = int(offsets[row]), length - int(candidates[row])
        for place in range(items, length):
            chosen = torch.tensor([*range(start, start + items), start + place])
            want = hstu_row(layer, values[chosen], times[chosen], causal=True)
            torch.testing.assert_close(found[start + place], want[-1], rtol=1e-5, atol=1e-5)
            if place == items:
                torch.testing.assert_close(found[start : start + items], want[:-1], rtol=1e-5, atol=1e-5)


def test_semi_local_attention_sees_the_prefix_and_the_last_positions() -> None:
    torch.manual_seed(3)
    layer = HSTULayer(HSTUConfig(dim=DIM, max_length=20, local=4, prefix=2))
    values, offsets = torch.randn(12, DIM), torch.tensor([0, 12])
    items = torch.tensor([10])  # 2 of context, 8 items, 2 candidates
    before = layer(values, Layout(offsets, items=items))
    for position in range(12):
        changed = values.clone()
        changed[position] += torch.randn(DIM)
        differs = (layer(changed, Layout(offsets, items=items)) != before).any(1).nonzero().flatten().tolist()
        items_that_see = [n for n in range(position, 10) if position < 2 or n - position < 4]
        candidates = [] if 2 <= position <= 6 else [10, 11]  # the last of four is the candidate itself
        assert differs == (items_that_see + candidates if position < 10 else [position]), position


def check_buckets(kind: str) -> None:
    values, offsets, times = rows()
    model = encoder(kind)
    found = model(values, Layout(offsets, times))
    torch.testing.assert_close(model(values, Layout(offsets, times, width=max(LENGTHS))), found, rtol=1e-6, atol=1e-6)
    alone = [
        model(values[start:stop], Layout(torch.tensor([0, stop - start]), times[start:stop]))
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    torch.testing.assert_close(torch.cat(alone), found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["pre", "post", "hstu"])
def test_padding_and_buckets_change_nothing(kind: str) -> None:
    check_buckets(kind)


@pytest.mark.parametrize("kind", ["pre", "post", "hstu"])
def test_what_comes_later_changes_nothing_before(kind: str) -> None:
    values, offsets, times = rows()
    model, layout = encoder(kind), Layout(offsets, times)
    before = model(values, layout)
    for row, length in enumerate(LENGTHS):
        for place in range(1, length, 5):
            changed = values.clone()
            changed[int(offsets[row]) + place] += 1.0
            after = model(changed, layout)
            same = torch.ones(len(values), dtype=torch.bool)
            same[int(offsets[row]) + place : int(offsets[row + 1])] = False
            assert torch.equal(after[same], before[same])
            assert not torch.equal(after[~same], before[~same])


def softmax_row(layer: attention.SelfAttention, x: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=1)
    out, width = torch.zeros_like(v), DIM // layer.heads
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            seen = [j for j in range(len(x)) if j <= i or not causal]
            shares = torch.softmax(torch.stack([q[i, part] @ k[j, part] / width**0.5 for j in seen]), 0)
            out[i, part] = shares @ v[seen][:, part]
    return out @ layer.out.weight.T + layer.out.bias


def test_softmax_attention_is_its_formula() -> None:
    values, offsets, _ = rows()
    for causal in (True, False):
        torch.manual_seed(1)
        layer = attention.SelfAttention(DIM, 2, causal)
        found = layer(values, Layout(offsets))
        for row, length in enumerate(LENGTHS):
            part = slice(int(offsets[row]), int(offsets[row]) + length)
            if length:
                torch.testing.assert_close(found[part], softmax_row(layer, values[part], causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["pre", "post", "hstu"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_without_any_position_gradients_are_zero(kind: str, lengths: list[int]) -> None:
    values, offsets, times = rows(lengths)
    model = encoder(kind)
    out = model(values.requires_grad_(), Layout(offsets, times))
    assert out.shape == (0, DIM)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_positions_count_from_either_end() -> None:
    layout = Layout(torch.tensor([0, 3, 3, 5]))
    newest, oldest = Positions(4, 2), Positions(4, 2, count_from="oldest")
    assert torch.equal(newest(layout), newest.vectors[[2, 1, 0, 1, 0]])
    assert torch.equal(oldest(layout), oldest.vectors[[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="a row has 3 items, the model's max_length is 2"):
        Positions(2, 2)(layout)
    with pytest.raises(ValueError, match="count_from='end' must be"):
        Positions(2, 2, count_from="end")
    with pytest.raises(ValueError, match="the sequence has none"):
        encoder("hstu")(torch.randn(5, DIM), layout)
    with pytest.raises(ValueError, match="dim=6 must be a multiple of heads=4"):
        attention.SelfAttention(6, 4)


def test_layers_share_the_time_buckets_and_keep_no_int64_of_pairs() -> None:
    torch.manual_seed(3)
    model = HSTUEncoder(HSTUConfig(dim=DIM, max_length=20, blocks=3, use_times=True))
    values, offsets, times = rows()
    layout, kept = Layout(offsets, times), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model(values.requires_grad_(), layout).sum()
    pairs = [tensor for tensor in kept if not tensor.is_floating_point() and tensor.dim() == 3]
    of_buckets = {bucket.data_ptr() for bucket in layout.time_buckets.values()}
    assert pairs and {tensor.dtype for tensor in pairs if tensor.data_ptr() in of_buckets} == {torch.int32}
    assert not any(tensor.dtype == torch.int64 for tensor in pairs)
    assert len(layout.time_buckets) == len(layout.buckets)


def test_the_time_bias_of_long_rows_is_that_of_each_row() -> None:
    """Their logarithms are taken row by row."""
    length, bias = 2900, RelativeBias(2900, use_times=True)
    times = torch.randint(1, 10**6, (2 * length,), generator=torch.Generator().manual_seed(1))
    together, alone = (
        Layout(torch.tensor([0, length, 2 * length]), times),
        Layout(torch.tensor([0, length]), times[length:]),
    )
    with torch.no_grad():
        found, want = bias(together, together.buckets[0]), bias(alone, alone.buckets[0])
    assert torch.equal(found[1], want[0])
