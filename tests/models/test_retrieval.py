"""Retrieval models: every loss against its formula, the same function on any number of ranks, faults that are found."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import DistributedModelParallel, EmbeddingCollectionSharder, EmbOptimType, ShardingEnv, comm
from rayrec.models import Batch, ItemFeatures, TwoTower, hstu, sasrec
from rayrec.models.corpus import Corpus
from rayrec.models.next_item import NextItem
from rayrec.models.retrieval_loss import LOSSES, Pairs, RetrievalLoss
from rayrec.models.retriever import HistoryOf, ItemVectors, batch_of
from rayrec.models.samplers import PopularitySampler, StreamingFrequency, UniformSampler
from rayrec.modules import EmbeddingConfig
from rayrec.modules.attention import Layout
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.ranks import on_ranks

ITEMS, DIM, MOST = 12, 6, 5
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [], [5, 3], [8], [9, 7, 9, 3], [2, 2, 2], [1, 0]]
NEGATIVES = 7


def batch(sequences: list[list[int]] = SEQUENCES, weight: torch.Tensor | None = None) -> Batch:
    made = replace(batch_of("item", sequences), weight=weight)
    return replace(made, lists={"h.at": torch.arange(len(made.sparse.values())) * 100})


def tables() -> list[EmbeddingConfig]:
    table = EmbeddingConfig(num_embeddings=ITEMS, embedding_dim=DIM, name="item", feature_names=["item"])
    return [replace(table, init_fn=_normal)]


def _normal(rows: torch.Tensor) -> None:
    rows.normal_()


class AsItIs(nn.Module):
    """An encoder without an opinion, so that formulas are short."""

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return x


def counts() -> list[float]:
    return [1.0 + item % 4 for item in range(ITEMS)]


def plain(kind: str, **loss: Any) -> NextItem:
    settings = {"kind": kind, "negatives": NEGATIVES, "temperature": 0.8, "counts": counts(), **loss}
    return NextItem(ItemVectors(tables(), "item", "cpu", 1), AsItIs(), HistoryOf("item"), MOST, loss=settings)


def formula(model: NextItem, weights: torch.Tensor | None) -> float:
    """The loss of a step, position by position, in doubles."""
    kind, loss = model.loss_kind, model.loss  # type: ignore[attr-defined]
    table = model.item_vectors.embeddings.embeddings["item"].weight.detach().double()
    share = [count / sum(counts()) for count in counts()]
    drawn = loss.draw().tolist()
    pairs, positives = [], []
    for row, whole in enumerate(SEQUENCES):
        kept = whole[-(MOST + 1) :]
        weight = 1.0 if weights is None else float(weights[row])
        pairs += [(before, after, weight) for before, after in zip(kept, kept[1:], strict=False)]
    positives = [after for _, after, _ in pairs]
    total = 0.0
    for before, after, weight in pairs:
        query = table[before] * math.sqrt(DIM) / 0.8
        uniform, met = math.log(NEGATIVES / ITEMS), {i: math.log(share[i] * len(pairs)) for i in range(ITEMS)}
        others: list[tuple[int, float]] = []
        if kind == "softmax":
            others = [(i, 0.0) for i in range(ITEMS) if i != after]
        if LOSSES[kind].drawn:
            others += [(i, uniform) for i in drawn if i != after]
        if LOSSES[kind].in_batch:
            others += [(i, met[i]) for i in positives if i != after]
        own = met[after] if LOSSES[kind].in_batch else uniform if kind == "sampled_softmax" else 0.0
        good = float(query @ table[after])
        bad = [(float(query @ table[i]), q) for i, q in others]
        total += weight * of_position(kind, good, own, bad)
    return total / sum(weight for _, _, weight in pairs)


def of_position(kind: str, good: float, own_q: float, bad: list[tuple[float, float]]) -> float:
    def log1pexp(x: float) -> float:
        return math.log1p(math.exp(x))

    if kind == "bce":
        return log1pexp(-good) + sum(log1pexp(s) for s, _ in bad) / len(bad)
    if kind == "bpr":
        return sum(log1pexp(s - good) for s, _ in bad) / len(bad)
    if kind == "gbce":
        alpha, t = NEGATIVES / (ITEMS - 1), 0.75
        beta = alpha * (t * (1 - 1 / alpha) + 1 / alpha)
        return (beta * log1pexp(-good) + sum(log1pexp(s) for s, _ in bad)) / (1 + NEGATIVES)
    exps = [math.exp(good - own_q), *(math.exp(s - q) for s, q in bad)]
    return -math.log(exps[0] / sum(exps))


def check_formula(kind: str) -> None:
    model = plain(kind)
    model.loss_kind = kind  # type: ignore[assignment]
    for weight in (None, torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0, 1.0])):
        want = formula(model, weight)
        found, logits = model(batch(weight=weight))
        assert logits.shape == (len(SEQUENCES),)
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_its_formula(kind: str) -> None:
    check_formula(kind)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_in_bfloat16_stays_near(kind: str) -> None:
    found = []
    for enabled in (False, True):
        model = make(kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, _ = model(batch())
        loss.backward()
        assert loss.dtype == torch.float32
        found.append((loss.detach(), model.item_vectors.embeddings.embeddings["item"].weight.grad))
    (whole, grad), (half, near) = found
    torch.testing.assert_close(half, whole, rtol=0.02, atol=0)
    assert torch.cosine_similarity(grad.flatten(), near.flatten(), dim=0) > 0.995


def make(kind: str, family: str = "sasrec") -> NextItem:
    torch.manual_seed(2)
    given: dict[str, Any] = {"history": "item", "tables_device": "cpu", "seed": 1}
    loss: dict[str, Any] = {"kind": kind, "negatives": NEGATIVES, "temperature": 0.8, "counts": counts()}
    if family == "hstu":
        return hstu(tables(), 0, times="h.at", dropout=0.0, max_length=MOST, loss=loss, **given)
    if family == "features":
        model = sasrec(
            [*tables(), replace(tables()[0], num_embeddings=5, name="category", feature_names=["category"])],
            1,
            max_length=MOST,
            dropout=0.0,
            loss=loss,
            item_features=["category", "price"],
            dense_names=["price"],
            **given,
        )
        torch.nn.init.normal_(model.item_layer.weight)
        offsets = torch.tensor([0, *map(len, CATEGORIES)]).cumsum(0)
        ids = torch.tensor([id for one in CATEGORIES for id in one])
        model.use_items(lambda: ItemFeatures(PRICES[:, None], {"category": (ids, offsets)}))
        return model
    return sasrec(tables(), 0, max_length=MOST, dropout=0.0, loss=loss, **given)


SPLITS = {1: [7], 2: [5, 2], 3: [1, 0, 6]}  # rows of each rank


def of_rank(group: dist.ProcessGroup | None, weight: torch.Tensor | None) -> tuple[Batch, float]:
    """(its rows, their share of all weights)."""
    sizes = SPLITS[1 if group is None else group.size()]
    rank = 0 if group is None else group.rank()
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own = batch(SEQUENCES[part], None if weight is None else weight[part])
    return own, own.total_weight / batch(weight=weight).total_weight


def gradients(
    group: dist.ProcessGroup | None, kind: str, family: str, weighted: bool = False
) -> tuple[float, list[torch.Tensor]]:
    """The loss of all ranks' rows and its gradients, as the trainer adds them up."""
    model = make(kind, family)
    model.on_sharded(group)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0, 1.0]) if weighted else None
    rows, share = of_rank(group, weight)
    loss, logits = model(rows)
    weighed = loss * share if rows.rows else logits.sum() * 0.0
    weighed.backward()
    total = comm.all_reduce(weighed.detach().clone(), group)
    grads = [comm.all_reduce(p.grad.clone(), group) for p in model.parameters()]  # type: ignore[union-attr]
    return float(total), grads


def check_ranks(size: int, kind: str, family: str = "sasrec", weighted: bool = False) -> None:
    want, grads = gradients(None, kind, family, weighted)
    for found, of_ranks in on_ranks(size, gradients, kind, family, weighted):
        assert found == pytest.approx(want, rel=1e-5)
        torch.testing.assert_close(of_ranks, grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_one_function_on_any_number_of_ranks(size: int, kind: str) -> None:
    check_ranks(size, kind)


def test_the_softmax_of_items_dealt_to_ranks_is_one_function_in_blocks() -> None:
    """With weights, one query a block, and a rank without a query."""
    want, grads = gradients(None, "softmax", "sasrec", True)
    for found, of_ranks in on_ranks(3, gradients_in_blocks, "softmax"):
        assert found == pytest.approx(want, rel=1e-5)
        torch.testing.assert_close(of_ranks, grads, rtol=1e-5, atol=1e-5)


def gradients_in_blocks(group: dist.ProcessGroup, kind: str) -> tuple[float, list[torch.Tensor]]:
    before, RetrievalLoss.block_bytes = RetrievalLoss.block_bytes, 4
    try:
        return gradients(group, kind, "sasrec", True)
    finally:
        RetrievalLoss.block_bytes = before


def test_so_is_hstu_and_a_weighted_batch() -> None:
    check_ranks(3, "mixed", "hstu", weighted=True)


def test_so_is_a_model_with_features_of_items() -> None:
    check_ranks(2, "mixed", "features")


def test_features_of_items_are_added_to_the_items_that_are_scored() -> None:
    model = make("mixed", "features")
    vectors, pairs = model.item_vectors.embeddings.embeddings, model.pairs(batch(), torch.tensor([4, 0]))
    of_category, of_price = vectors["category"].weight, model.item_layer.weight[:, 0]
    means = [of_category[ids].mean(0) if ids else torch.zeros(DIM) for ids in CATEGORIES]
    own = torch.stack([mean + price * of_price for mean, price in zip(means, PRICES, strict=True)])
    torch.testing.assert_close(model.items(torch.arange(ITEMS)), vectors["item"].weight + own)
    torch.testing.assert_close(pairs.items, model.items(pairs.ids))
    torch.testing.assert_close(pairs.drawn, model.items(torch.tensor([4, 0])))
    torch.testing.assert_close(model.items(torch.tensor([-1]), model.features_of(torch.tensor([6])))[0], own[6])
    query = model.query(batch())
    with torch.no_grad():
        of_category.zero_()
    assert torch.equal(query, model.query(batch()))
    with pytest.raises(ValueError, match="sasrec: item_features has 'colour'"):
        sasrec(tables(), 0, history="item", item_features=["colour"])
    side = replace(tables()[0], name="category", feature_names=["category"])
    with pytest.raises(ValueError, match=r"'category' is in side, .* and in item_features"):
        sasrec([*tables(), side], 0, history="item", side=["category"], item_features=["category"])


def trained(group: dist.ProcessGroup | None, kind: str) -> dict[str, torch.Tensor]:
    """State after three steps, the item table sharded."""
    model: nn.Module = make(kind.removesuffix(", estimated"))
    if "estimated" in kind:
        model.loss.frequency = StreamingFrequency(ITEMS)
    env = ShardingEnv.from_local(1, 0) if group is None else ShardingEnv.from_process_group(group)
    sharder = EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.SGD, "learning_rate": 0.1})
    model = DistributedModelParallel(model, env=env, device=DEVICE, sharders=[sharder])
    optimizer = torch.optim.SGD(model.dense_parameters().values(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        rows, share = of_rank(group, None)
        loss, logits = model(rows.to(DEVICE))
        (loss * (share * env.world_size) if rows.rows else logits.sum() * 0.0).backward()
        optimizer.step()
    with torch.no_grad():
        items = model.module.items(torch.arange(ITEMS, device=DEVICE))
        dense = {name: p.detach().clone() for name, p in model.other_parameters().items()}
        return {"items": items, "query": model.module.query(batch().to(DEVICE)), **dense}


@pytest.mark.parametrize("kind", ["softmax", "mixed", "in_batch, estimated"])
def test_a_sharded_table_trains_as_one_process_does(kind: str) -> None:
    want = trained(None, kind)
    for found in on_ranks(3, trained, kind):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_row_without_history_asks_with_zeros() -> None:
    model = make("softmax").eval()
    found = model.query(batch())
    assert found.shape == (len(SEQUENCES), DIM)
    assert not found[1].any() and found[[0, 2, 3, 4, 5, 6]].abs().sum(1).gt(0).all()
    torch.testing.assert_close(model.query(batch([SEQUENCES[0][-MOST:]])), found[:1])  # the newest items are read


def test_samplers_are_seeded_by_step_and_know_their_q() -> None:
    popular = PopularitySampler(ITEMS, 5000, 3, power=0.5)
    popular.set_counts(torch.tensor(counts()))
    for sampler in (UniformSampler(ITEMS, 5000, 3), popular):
        first = sampler.draw(4)
        assert torch.equal(first, sampler.draw(4))
        assert not torch.equal(first, sampler.draw(5))
        met = torch.bincount(first, minlength=ITEMS)
        torch.testing.assert_close(met.float(), sampler.log_q(torch.arange(ITEMS)).exp(), rtol=0.2, atol=0)


def test_a_frequency_is_learned_from_gaps() -> None:
    frequency = StreamingFrequency(3, rate=0.2)
    for step in range(200):
        batch = torch.tensor([0] + [1] * (step % 4 == 0))
        log_q = frequency.log_q(torch.tensor([0, 1]), batch, step)
    torch.testing.assert_close(log_q.exp(), torch.tensor([1.0, 0.25]), rtol=0.02, atol=0)


def test_the_expected_count_of_items_that_a_batch_has_many_times() -> None:
    generator, items, rows = torch.Generator().manual_seed(0), 500, 128
    share = 1 / torch.arange(1, items + 1).double()
    share /= share.sum()  # from 19 occurrences a step to one in 26 steps
    frequency, mean = StreamingFrequency(items), torch.zeros(items)
    for step in range(800):
        ids = torch.multinomial(share, rows, replacement=True, generator=generator)
        log_q = frequency.log_q(torch.arange(items), ids, step)
        mean += log_q / 500 if step >= 300 else 0
    error = mean - (share * rows).log().float()
    for first, last in [(0, 1), (1, 5), (5, 20), (20, 100), (100, 500)]:
        assert abs(float(error[first:last].mean())) < 0.1


def test_a_new_item_is_one_of_average_frequency_at_first() -> None:
    others = torch.arange(1, 100)
    for start, at_first in [(0, 1.0), (9, 0.1), (50_000, 0.01)]:  # ids of 100 rows among 10,000 items: one in 100 steps
        frequency = StreamingFrequency(10_000)
        found = []
        for step in range(start, start + 21, 10):
            found.append(float(frequency.log_q(torch.tensor([0]), torch.cat([torch.tensor([0]), others]), step).exp()))
        assert found == pytest.approx([at_first, 0.1, 0.1])


def test_an_evaluation_does_not_change_the_frequencies() -> None:
    model = make("in_batch")
    model.loss.frequency = StreamingFrequency(ITEMS)
    model(batch())
    before = {name: tensor.clone() for name, tensor in model.loss.state_dict().items()}
    model.eval()(batch([[1, 2, 3]]))
    torch.testing.assert_close(model.loss.state_dict(), before)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    model = make("sampled_softmax")
    model(batch())
    again = make("sampled_softmax")
    assert not torch.equal(again.loss.draw(), model.loss.draw())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.loss.draw(), model.loss.draw())


@pytest.mark.parametrize("kind", ["sampled_softmax", "mixed", "softmax"])
def test_a_batch_prepared_ahead_trains_as_another(kind: str) -> None:
    """Also if its candidates are drawn, and it is copied, before the steps before it."""

    def losses(ahead: bool) -> list[float]:
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [batch(), batch(SEQUENCES[::-1]), batch([[]])]
        if ahead:
            batches = [model.prepare(rows, number).to(DEVICE) for number, rows in enumerate(batches)]
        found = []
        for rows in batches:
            optimizer.zero_grad()
            loss, logits = model(rows)
            (loss if rows.rows else logits.sum()).backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    assert losses(ahead=True) == losses(ahead=False)


def test_wrong_settings_are_named() -> None:
    for settings, text in [
        ({"kind": "softmx"}, "unknown kind 'softmx'; choose one of softmax, sampled_softmax"),
        ({"sampler": "all"}, "unknown sampler 'all'; choose one of uniform, popularity"),
        ({"sampler": "popularity"}, "needs counts"),
        ({"temperature": 0}, "temperature=0 must be above 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            RetrievalLoss(ITEMS, **settings)


CATEGORIES = [[item % 3, 3 + item % 2][: item % 3] for item in range(ITEMS)]
PRICES = torch.arange(ITEMS).float().cos()


def towers_batch(rows: slice) -> Batch:
    """Users' lists, items with categories, and labels of which some are 0; the last number is the item's price."""
    generator = torch.Generator().manual_seed(5)
    lists = [torch.randint(0, 9, (size,), generator=generator).tolist() for size in (2, 0, 3, 1, 0, 4, 1)][rows]
    items = torch.randint(0, ITEMS, (7,), generator=generator).tolist()[rows]
    dense = torch.cat([torch.randn(7, 2, generator=generator)[rows], PRICES[items][:, None]], dim=1)
    categories = [CATEGORIES[item] for item in items]
    columns = [*lists, *([item] for item in items), *categories]
    ids = torch.tensor([i for one in columns for i in one], dtype=torch.int64)
    lengths = torch.tensor([len(one) for one in columns], dtype=torch.int64)
    labels = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])[rows]
    return Batch(dense, KeyedJaggedTensor(["genre", "item", "category"], ids, lengths=lengths), labels)


def two_tower(own: bool = False) -> TwoTower:
    """
    Args:
        own: Category and price are features of the item, not of the query. The category shares the query's table.
    """
    torch.manual_seed(2)
    genre = EmbeddingConfig(
        num_embeddings=9, embedding_dim=DIM, name="genre", feature_names=["genre", "category"], init_fn=_normal
    )
    model = TwoTower([genre, *tables()], 3, item="item", towers=[8, 4], tables_device="cpu", seed=1,
                     item_features=["category", "price"] if own else [], dense_names=["age", "age", "price"],
                     loss={"kind": "mixed", "negatives": NEGATIVES, "counts": counts()})  # fmt: skip
    if own:
        offsets = torch.tensor([0, *map(len, CATEGORIES)]).cumsum(0)
        ids = torch.tensor([id for one in CATEGORIES for id in one])
        model.use_items(lambda: ItemFeatures(PRICES[:, None], {"category": (ids, offsets)}))
    return model


def tower_gradients(group: dist.ProcessGroup | None, own: bool = False) -> list[torch.Tensor]:
    model, sizes = two_tower(own), SPLITS[1 if group is None else group.size()]
    model.on_sharded(group)
    rank = 0 if group is None else group.rank()
    start = sum(sizes[:rank])
    loss, logits = model(towers_batch(slice(start, start + sizes[rank])))
    (loss * (sizes[rank] / 7) if sizes[rank] else logits.sum() * 0.0).backward()
    return [comm.all_reduce(p.grad.clone(), group) for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "own"), [(2, True), (3, False)])
def test_two_towers_are_one_function_on_any_number_of_ranks(size: int, own: bool) -> None:
    want = tower_gradients(None, own)
    assert all(grad.any() for grad in want)
    for found in on_ranks(size, tower_gradients, own):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_an_item_has_one_vector_wherever_its_features_come_from() -> None:
    """From its row, from those of the model's items, or given; an item without a row is found by features alone."""
    model, batch = two_tower(own=True), towers_batch(slice(None))
    drawn = torch.tensor([4, 0, 7, 7])
    pairs = model.pairs(batch, drawn)
    torch.testing.assert_close(pairs.items, model.items(pairs.ids))
    torch.testing.assert_close(pairs.drawn, model.items(drawn))
    features = model.features_of(torch.tensor([5, 6]))
    of_5, of_6 = model.items(torch.tensor([5, -1]), features)
    torch.testing.assert_close(of_5, model.items(torch.tensor([5]))[0])
    with torch.no_grad():
        model.embeddings.embeddings["item"].weight[6] = 0
    torch.testing.assert_close(of_6, model.items(torch.tensor([6]))[0])
    query = model.query(batch)
    torch.testing.assert_close(query, model.query(replace(batch, dense=batch.dense[:, :2])))
    changed = replace(batch, dense=batch.dense + torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(query, model.query(changed)) and not torch.equal(pairs.items, model.pairs(changed, drawn).items)


def test_towers_pool_by_mean_and_score_items_alike() -> None:
    model, batch_of_users = two_tower(own=True).eval(), towers_batch(slice(0, 7))
    pairs = model.pairs(batch_of_users, torch.tensor([3]))
    chosen = batch_of_users.label > 0
    assert torch.equal(pairs.ids, batch_of_users.sparse["item"].values()[chosen])
    torch.testing.assert_close(model.items(pairs.ids), pairs.items)
    torch.testing.assert_close(model.items(torch.tensor([3])), pairs.drawn)
    torch.testing.assert_close(model.query(batch_of_users)[chosen], pairs.query)
    genres = model.embeddings.embeddings["genre"].weight
    ids, offsets = batch_of_users.sparse["genre"].values(), batch_of_users.sparse["genre"].offsets().tolist()
    for row, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        mean = genres[ids[start:stop]].mean(0) if stop > start else torch.zeros(DIM)
        want = model.query_tower(torch.cat([batch_of_users.dense[row, :2], mean])[None])
        torch.testing.assert_close(model.query(batch_of_users)[row], torch.nn.functional.normalize(want)[0])
    with pytest.raises(ValueError, match="feature 'film' is read by 0 tables"):
        TwoTower(tables(), 0, item="film")
    with pytest.raises(ValueError, match="item_features has 'colour'"):
        TwoTower(tables(), 0, item="item", item_features=["colour"])


@pytest.mark.parametrize("own", [False, True])
def test_rows_without_a_positive_are_looked_up_for_hard_negatives_alone(own: bool) -> None:
    """The loss is that of the batch without them."""
    batch, positive = towers_batch(slice(None)), [0, 1, 3, 4, 6]
    assert [row for row in range(7) if batch.label[row] > 0] == positive
    kept = {name: batch.sparse[name] for name in batch.sparse.keys()}
    lists = [jagged.values().split(jagged.lengths().tolist())[row] for jagged in kept.values() for row in positive]
    lengths = torch.tensor([len(ids) for ids in lists])
    alone = Batch(
        batch.dense[positive], KeyedJaggedTensor(list(kept), torch.cat(lists), lengths=lengths), batch.label[positive]
    )
    model = two_tower(own).eval()
    prepared = [model.prepare(one).prepared for one in (batch, alone)]
    assert prepared[0] is not None and prepared[0].lookup is not None
    assert prepared[1] is not None and prepared[1].lookup is not None
    assert torch.equal(prepared[0].lookup.values(), prepared[1].lookup.values())
    torch.testing.assert_close(model(batch)[0], model(alone)[0])
    model.use_loss({"kind": "mixed", "negatives": NEGATIVES, "hard_negatives": True})
    whole = model.prepare(batch).prepared
    assert whole is not None and whole.lookup is not None
    assert len(whole.lookup.values()) > len(prepared[0].lookup.values())


def test_one_temperature_for_vectors_of_length_1_in_all_models() -> None:
    given: dict[str, Any] = {"tables_device": "cpu", "seed": 1}
    query = replace(tables()[0], name="user", feature_names=["user"])
    for normalize, expected in [(True, 0.05), (False, 1.0)]:
        models = [
            sasrec(tables(), 0, history="item", normalize=normalize, **given),
            hstu(tables(), 0, history="item", normalize=normalize, **given),
            TwoTower([query, *tables()], 0, item="item", normalize=normalize, **given),
        ]
        assert [model.loss.temperature for model in models] == [expected] * 3
    assert (
        sasrec(tables(), 0, history="item", normalize=True, loss={"temperature": 0.3}, **given).loss.temperature == 0.3
    )


def test_without_towers_the_tables_have_to_agree() -> None:
    query = replace(tables()[0], name="user", feature_names=["user"])
    with pytest.raises(ValueError, match=r"towers=\[\] .* width 6, but the query has 9 numbers .*user; 3 dense"):
        TwoTower([query, *tables()], 3, item="item", towers=[])


def test_a_retrievers_table_starts_in_its_bound() -> None:
    table = EmbeddingConfig(num_embeddings=2000, embedding_dim=DIM, name="item", feature_names=["item"])
    bounded = replace(table, weight_init_min=-1.5, weight_init_max=1.5)
    for config, deviation in [(table, 0.02), (bounded, 1.5 / math.sqrt(3))]:
        towers = TwoTower([replace(config, name="user", feature_names=["user"]), config], 0, item="item",
                          tables_device="cpu", seed=1).embeddings.embeddings  # fmt: skip
        encoder = sasrec([config], 0, history="item", tables_device="cpu", seed=1).item_vectors.embeddings.embeddings
        for weight in (towers["user"].weight, towers["item"].weight, encoder["item"].weight):
            assert float(weight.detach().std()) == pytest.approx(deviation, rel=0.05)


def test_a_question_is_the_newest_item_after_those_before_it() -> None:
    model = make("softmax").eval()
    asked = model.question(batch())
    rows = [one for one in SEQUENCES if one]
    assert asked.target.tolist() == [one[-1] for one in rows]
    ids, offsets = asked.seen  # type: ignore[misc]
    parts = [ids[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    assert parts == [one[:-1] for one in rows]
    torch.testing.assert_close(asked.query, model.query(batch([one[:-1] for one in rows])))


def test_side_features_are_added_to_the_items_that_are_read() -> None:
    """Not to those that are asked for, in training, questions and requests."""
    genre = EmbeddingConfig(num_embeddings=4, embedding_dim=DIM, name="genre", feature_names=["genre"], init_fn=_normal)
    vectors = ItemVectors([*tables(), genre], "item", "cpu", 1, side=["genre"])
    loss = {"kind": "sampled_softmax", "negatives": NEGATIVES}
    model = NextItem(vectors, AsItIs(), HistoryOf("item", side=("genre",)), MOST, loss=loss)
    of_item, of_genre = (vectors.embeddings.embeddings[name].weight for name in ("item", "genre"))
    lengths = torch.tensor([len(items) for items in SEQUENCES] * 2)
    items = [item for items in SEQUENCES for item in items]
    ids = torch.tensor([*items, *(item % 4 for item in items)])

    def with_side(item: int) -> torch.Tensor:
        return (of_item[item] + of_genre[item % 4]) * DIM**0.5

    rows = replace(batch(), sparse=KeyedJaggedTensor(["item", "genre"], ids, lengths=lengths))
    newest = torch.stack([with_side(items[-1]) if items else torch.zeros(DIM) for items in SEQUENCES])
    torch.testing.assert_close(model.query(rows), newest)
    drawn = torch.arange(3)
    found = model.pairs(rows, drawn)
    kept = [items[-(MOST + 1) :] for items in SEQUENCES]
    torch.testing.assert_close(found.query, torch.stack([with_side(item) for items in kept for item in items[:-1]]))
    torch.testing.assert_close(found.items, of_item[found.ids])
    torch.testing.assert_close(found.drawn, of_item[drawn])
    torch.testing.assert_close(model.items(drawn), of_item[drawn])
    asked = model.question(rows)
    before = [with_side(items[-2]) if len(items) > 1 else torch.zeros(DIM) for items in SEQUENCES if items]
    torch.testing.assert_close(asked.query, torch.stack(before))
    lengths[1] += 1
    lengths[0] -= 1
    with pytest.raises(ValueError, match="side feature 'genre' must have an id for each item of 'item'; list both in"):
        model.query(replace(rows, sparse=KeyedJaggedTensor(["item", "genre"], ids, lengths=lengths)))
    narrow = replace(genre, embedding_dim=DIM + 1)
    with pytest.raises(ValueError, match="side feature 'genre': its table has embedding_dim 7, the items' 6; they"):
        ItemVectors([*tables(), narrow], "item", "cpu", 1, side=["genre"])


def test_training_evaluation_and_a_request_ask_the_same_question() -> None:
    """With times, of the time of the item that is asked for; also of a history that is longer than the model reads."""
    model = make("softmax", "hstu").eval()
    model.encoder.layers[0].bias.by_time.data.normal_()  # type: ignore[index, union-attr]
    whole = batch([[3, 1, 4, 5], [9, 2, 6, 7, 0, 8, 1, 3]])
    times = torch.tensor([10, 20, 25, 90_000, 5, 6, 7, 60, 61, 62, 63, 5_000])
    whole = replace(whole, lists={"h.at": times})
    asked = model.question(whole)
    pairs = model.pairs(whole, torch.tensor([0]))
    last = torch.tensor([2, 2 + MOST])  # the last pair of each row
    torch.testing.assert_close(asked.query, pairs.query[last])
    prefix = replace(batch([[3, 1, 4], [9, 2, 6, 7, 0, 8, 1]]), lists={"h.at": times[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10]]})
    at_its_time = replace(prefix, time=times[[3, 11]])
    torch.testing.assert_close(model.query(at_its_time), asked.query)
    assert not torch.allclose(model.query(prefix), asked.query, atol=1e-4)
    model.longest = 4  # of the schema: training has three items before a target
    short = replace(batch([[3, 1, 4], [0, 8, 1]]), lists={"h.at": times[[0, 1, 2, 8, 9, 10]]}, time=times[[3, 11]])
    found = model.question(whole)
    torch.testing.assert_close(found.query, model.query(short))
    assert found.seen is not None and asked.seen is not None and torch.equal(found.seen[0], asked.seen[0])


@pytest.mark.parametrize("kind", LOSSES)
def test_rows_without_an_item_are_neither_positives_nor_negatives(kind: str) -> None:
    """The loss on rows 2 to 7 of a table of 12 is that of a table of these six alone."""
    large, small = (RetrievalLoss(size, kind=kind, negatives=NEGATIVES) for size in (ITEMS, 6))
    large.use_corpus(Corpus(6, first=2))
    generator = torch.Generator().manual_seed(3)
    query, table = torch.randn(9, DIM, generator=generator), torch.randn(ITEMS, DIM, generator=generator)
    targets = torch.tensor([2, 0, 7, 5, 11, 2, 3, 1, 6])  # three are not items
    known = (targets >= 2) & (targets < 8)
    drawn, expected = large.draw(), small.draw()
    assert torch.equal(drawn, expected + 2)
    found = large(Pairs(query, targets, table[targets], table[drawn]), drawn, None)
    own = targets[known]
    wanted = small(Pairs(query[known], own - 2, table[own], table[drawn]), expected, None)
    if not LOSSES[kind].in_batch:  # whose estimate of q counts unknown items, too
        torch.testing.assert_close(found, wanted)
    else:
        assert abs(float(found - wanted)) < 0.6 and found.isfinite()


@pytest.mark.parametrize("kind", ["in_batch", "mixed", "bce", "softmax"])
def test_scores_in_blocks_are_those_of_one(kind: str) -> None:
    def trained_once(block_bytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = make(kind)
        model.loss.block_bytes = block_bytes
        loss, _ = model(batch(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0, 1.0])))
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    torch.testing.assert_close(trained_once(4 * 3 * ITEMS), trained_once(1 << 20))


def test_hard_negatives_are_candidates_of_all_rows() -> None:
    """Against the formula, with exact counts of the items of all rows."""
    rows = towers_batch(slice(0, 7))
    genre = EmbeddingConfig(num_embeddings=9, embedding_dim=DIM, name="genre", feature_names=["genre"], init_fn=_normal)
    settings = {"kind": "in_batch", "counts": counts(), "hard_negatives": True}
    model = TwoTower([genre, *tables()], 3, item="item", towers=[8, 4], tables_device="cpu", seed=1, loss=settings)
    ids, positive = rows.sparse["item"].values(), rows.label > 0
    assert torch.equal(model.candidates(rows), ids) and torch.equal(model.positives(rows), ids[positive])
    query, items = model.query(rows).detach() / 0.05, model.items(ids).detach()
    log_q = (torch.tensor(counts())[ids] / sum(counts()) * len(ids)).log()
    scores = query @ items.T - log_q
    total = 0.0
    for row in positive.nonzero().flatten().tolist():
        others = [i for i in range(7) if int(ids[i]) != int(ids[row])]
        total += float(torch.logsumexp(scores[row][[row, *others]], 0) - scores[row, row])
    assert float(model(rows)[0].detach()) == pytest.approx(total / int(positive.sum()), rel=1e-5)


def test_counts_of_the_data_are_set_once_and_kept() -> None:
    settings = {"kind": "mixed", "sampler": "popularity", "power": 0.75, "counts": "data", "negatives": 4000}
    loss = RetrievalLoss(ITEMS, **settings)
    assert loss.lacks_counts
    loss.set_counts(torch.tensor(counts()))
    again = RetrievalLoss(ITEMS, **settings)
    again.load_state_dict(loss.state_dict())
    assert not again.lacks_counts and torch.equal(again.draw(), loss.draw())
    share = torch.tensor(counts()) ** 0.75
    found = torch.bincount(loss.draw(), minlength=ITEMS) / 4000
    torch.testing.assert_close(found, share / share.sum(), rtol=0.2, atol=0)
    with pytest.raises(ValueError, match="at least one of the counts must be above 0"):
        loss.set_counts(torch.zeros(ITEMS))
    with pytest.raises(ValueError, match="3 counts were given for 12 rows"):
        RetrievalLoss(ITEMS, kind="in_batch", counts=[1, 2, 3])
