"""Full-corpus ranking: plain Python beside it, ties, seen items, random and constant scores, ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from rayrec.metrics.ranking import (
    BucketedRanks,
    Jagged,
    RankingMetrics,
    TopItems,
    metrics_of_groups,
    part_of,
    popularity_ranks,
    target_ranks,
)
from tests.ranks import on_ranks

ITEMS, ROWS, DIM = 40, 30, 5


def jagged(rows: list[list[int]]) -> Jagged:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Jagged(torch.tensor([i for row in rows for i in row], dtype=torch.int64), offsets)


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-2, 3, (ROWS, DIM), generator=generator).float()  # many ties
    items = torch.randint(-2, 3, (ITEMS, DIM), generator=generator).float()
    targets = torch.randint(0, ITEMS, (ROWS,), generator=generator)
    seen = [torch.randint(0, ITEMS, (row % 7,), generator=generator).tolist() for row in range(ROWS)]
    seen[3] = [*seen[3], int(targets[3])]  # a target that was seen before stays in
    return queries, items, targets, seen


@pytest.mark.parametrize("filtered", [False, True])
def test_a_targets_rank_is_exact_and_ties_count_against_it(filtered: bool) -> None:
    queries, items, targets, seen = drawn()
    found = target_ranks(queries, items, targets, jagged(seen) if filtered else None)
    for row in range(ROWS):
        target = int(targets[row])
        left = [i for i in range(ITEMS) if i != target and not (filtered and i in seen[row])]
        own = float(queries[row] @ items[target])
        assert int(found[row]) == sum(float(queries[row] @ items[i]) >= own for i in left)


def test_scores_of_several_blocks_are_ranked_as_those_of_one() -> None:
    """A block has 64 MiB of scores: seven rows of so many items, and the last block fewer."""
    queries, _, _, seen = drawn()
    items = torch.randint(-2, 3, ((64 << 20) // 4 // 7, DIM), generator=torch.Generator().manual_seed(1)).float()
    targets = torch.arange(ROWS) * 1000
    found = target_ranks(queries, items, targets, jagged(seen))
    for row in (0, 6, 7, ROWS - 1):
        alone = target_ranks(queries[[row]], items, targets[[row]], jagged([seen[row]]))
        assert found[row] == alone[0]


def test_figures_are_their_definitions_and_say_whether_seen_items_were_left_out() -> None:
    figures = RankingMetrics.of(torch.tensor([0, 3, 12]), (5, 10)).metrics()
    assert figures["hr@5/unseen"] == pytest.approx(2 / 3)
    assert figures["ndcg@5/unseen"] == pytest.approx((1 + 1 / math.log2(5)) / 3)
    assert figures["mrr/unseen"] == pytest.approx((1 + 1 / 4 + 1 / 13) / 3)
    assert set(RankingMetrics.of(torch.tensor([0]), (5,), filtered=False).metrics()) == {"hr@5", "ndcg@5", "mrr"}
    nothing = RankingMetrics.of(torch.tensor([], dtype=torch.int64)).metrics()
    assert set(nothing.values()) == {None} and "mrr/unseen" in nothing
    weighted = RankingMetrics.of(torch.tensor([0, 3, 12]), (5,), weights_B=torch.tensor([3.0, 1.0, 0.0]))
    repeated = RankingMetrics.of(torch.tensor([0, 0, 0, 3]), (5,))
    assert weighted.metrics() == pytest.approx(repeated.metrics()) and (weighted.rows, repeated.rows) == (3, 4)


def test_random_scores_find_what_chance_finds_and_constant_ones_no_more() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, items = 20_000, 500
    queries = torch.randn(rows, 32, generator=generator)
    vectors = torch.randn(items, 32, generator=generator)
    targets = torch.randint(0, items, (rows,), generator=generator)
    random = RankingMetrics.of(target_ranks(queries, vectors, targets), (10,)).metrics()["hr@10/unseen"]
    assert random == pytest.approx(10 / items, abs=5 * math.sqrt(10 / items / rows))
    constant = target_ranks(queries, torch.ones(items, 32), targets)
    assert RankingMetrics.of(constant, (10,)).metrics()["hr@10/unseen"] <= 10 / items
    with pytest.raises(ValueError, match="is not finite"):
        target_ranks(queries[:1] * math.nan, vectors, targets[:1])


def test_popularity_is_the_order_of_counts() -> None:
    counts = torch.tensor([5, 9, 1, 7])
    assert popularity_ranks(counts, torch.tensor([1, 3, 0, 2])).tolist() == [0, 1, 2, 3]
    assert popularity_ranks(counts, torch.tensor([0]), jagged([[1, 3]])).tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_popularity_is_ranked_as_a_model_of_counts_would_be(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (30,), generator=draw)  # many ties
    targets = torch.randint(30, (50,), generator=draw)
    rows = [torch.randint(30, (n,), generator=draw).tolist() for n in torch.randint(9, (50,), generator=draw)]
    for seen in (None, jagged([*rows[:-1], [int(targets[-1])] * 2])):  # items that come twice, the target among them
        expected = target_ranks(torch.ones(50, 1), counts.float()[:, None], targets, seen)
        assert popularity_ranks(counts, targets, seen).tolist() == expected.tolist()


def part_of_rank(group: dist.ProcessGroup) -> dict[str, float | None]:
    queries, items, targets, seen = drawn()
    cuts = [0, 0, 11, ROWS]  # the first rank has none
    start, stop = cuts[group.rank()], cuts[group.rank() + 1]
    ranks = target_ranks(queries[start:stop], items, targets[start:stop], jagged(seen[start:stop]))
    sums = BucketedRanks((5, 10))
    sums.update(torch.full_like(ranks, 7), ranks)
    return RankingMetrics((5, 10), True, sums.compute(group)[7]).metrics()


def test_ranks_add_up() -> None:
    queries, items, targets, seen = drawn()
    want = RankingMetrics.of(target_ranks(queries, items, targets, jagged(seen)), (5, 10)).metrics()
    assert all(found == pytest.approx(want, rel=1e-12) for found in on_ranks(3, part_of_rank))


def of_part(group: dist.ProcessGroup | None, sizes: list[int], filtered: bool) -> tuple[list[int], float]:
    """The ranks of a process's rows among items that are dealt to the processes, and the coverage."""
    queries, items, targets, seen = drawn(3)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own, top = part_of(ITEMS, rank, size), TopItems(3, ITEMS, torch.device("cpu"))
    ranks = target_ranks(
        queries[rows], items[own.start : own.stop], targets[rows], jagged(seen[rows]) if filtered else None,
        group=group, top=top,
    )  # fmt: skip
    return ranks.tolist(), top.coverage


@pytest.mark.parametrize("sizes", [[11, 19], [30, 0], [4, 25, 1]])
def test_items_dealt_to_ranks_are_ranked_as_those_of_one_process(sizes: list[int]) -> None:
    for filtered in (False, True):
        wanted, _ = of_part(None, [ROWS], filtered)
        found = on_ranks(len(sizes), of_part, sizes, filtered)
        assert [rank for ranks, _ in found for rank in ranks] == wanted
        assert len({coverage for _, coverage in found}) == 1
    assert [len(part_of(ITEMS, rank, 7)) for rank in range(7)] == [6] * 6 + [4]


def test_coverage_is_the_share_of_items_in_any_list() -> None:
    queries, items, targets, seen = drawn(5)
    queries, items = queries + torch.rand(ROWS, DIM), items + torch.rand(ITEMS, DIM)  # no ties
    top = TopItems(3, ITEMS, torch.device("cpu"))
    target_ranks(queries, items, targets, jagged(seen), top=top)
    found = set()
    for row in range(ROWS):
        left = [i for i in range(ITEMS) if i == int(targets[row]) or i not in seen[row]]
        found |= set(sorted(left, key=lambda i: -float(queries[row] @ items[i]))[:3])
    assert top.coverage == pytest.approx(len(found) / ITEMS)


def test_metrics_of_groups_are_their_formulas() -> None:
    generator = torch.Generator().manual_seed(2)
    group, target = (torch.randint(0, most, (60,), generator=generator) for most in (9, 12))
    rank_of = {(g, t): r for g in range(9) for t, r in enumerate(torch.randperm(40, generator=generator).tolist())}
    rank = torch.tensor([rank_of[pair] for pair in zip(group.tolist(), target.tolist(), strict=True)])
    found = metrics_of_groups(group, target, rank, (3, 10), filtered=False)
    by_group = [sorted({rank_of[g, int(t)] for t in target[group == g].tolist()}) for g in sorted(set(group.tolist()))]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    for k in (3, 10):
        hits = [[place for place in places if place < k] for places in by_group]
        assert found[f"hr@{k}"] == pytest.approx(mean([float(bool(hit)) for hit in hits]))
        sizes = [len(places) for places in by_group]
        assert found[f"recall@{k}"] == pytest.approx(mean([len(h) / n for h, n in zip(hits, sizes, strict=True)]))
        assert found[f"precision@{k}"] == pytest.approx(mean([len(hit) / k for hit in hits]))
        ap = [sum((i + 1) / (place + 1) for i, place in enumerate(hit)) for hit in hits]
        assert found[f"map@{k}"] == pytest.approx(mean([a / min(n, k) for a, n in zip(ap, sizes, strict=True)]))
        dcg = [sum(1 / math.log2(place + 2) for place in hit) for hit in hits]
        best = [sum(1 / math.log2(place + 2) for place in range(min(n, k))) for n in sizes]
        assert found[f"ndcg@{k}"] == pytest.approx(mean([d / b for d, b in zip(dcg, best, strict=True)]))
    assert found["mrr"] == pytest.approx(mean([1 / (places[0] + 1) for places in by_group]))
    nothing = torch.empty(0, dtype=torch.int64)
    assert set(metrics_of_groups(nothing, nothing, nothing, (3,)).values()) == {None}
