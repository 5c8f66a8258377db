"""Rankers with histories or several tasks: formulas spelled out, rows without history, any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.models import MODELS, Batch
from rayrec.models.esmm import logit_of_both
from rayrec.models.ranker import ModelInputs, RankerInput
from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.modules.encoder import EncoderConfig
from rayrec.modules.experts import ExpertSizes, MultiTask
from rayrec.modules.target_attention import TargetAttention, TargetTransformer
from rayrec.train.worker.micro_batches import micro_batch_of
from tests.device import DEVICE
from tests.distributed.embedding_oracle import plain_twin
from tests.distributed.oracle import ADAGRAD, ROWWISE, SGD, cut, draw_kjt, join
from tests.ranks import on_ranks

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01, "eps": 0.01}
ATTENTION = [{"history": ["seen", "seen_genre"], "target": ["item", "genre"]}]
ALONE = [{"history": ["seen", "seen_genre"], "target": ["item", None]}]  # the candidate has no genre
ARGS: dict[str, dict[str, Any]] = {
    "dcn": {"attention": ATTENTION, "dense_arch": [4], "over_arch": [6, 2], "attention_hidden": [5]},
    "din": {"attention": ATTENTION, "over_arch": [6, 2], "attention_hidden": [5]},
    "bst": {"attention": ATTENTION, "over_arch": [6, 2], "heads": 2, "blocks": 2, "hidden": 9},
    "hstu_ranker": {
        "attention": ALONE,
        "over_arch": [6, 2],
        "context": ["user"],
        "max_length": 4,
        "heads": 2,
        "dim": 8,
        "local": 4,
    },
    "mmoe": {"experts": 3, "expert": [6], "tower": [4], "attention": ALONE, "attention_hidden": [5, 3]},
    "ple": {"own": 2, "shared": 1, "expert": [6], "tower": [4]},
    "esmm": {"tower": [5], "attention": ATTENTION, "softmax": True, "attention_hidden": [5]},
}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="user", num_embeddings=20, embedding_dim=12, feature_names=["user"]),
        EmbeddingBagConfig(name="item", num_embeddings=30, embedding_dim=24, feature_names=["item", "seen", "liked"]),
        EmbeddingBagConfig(
            name="genre",
            num_embeddings=9,
            embedding_dim=12,
            feature_names=["genre", "seen_genre"],
            pooling=PoolingType.MEAN,
        ),
    ]


def batch(rows: int, seed: int = 0, histories: bool = True) -> Batch:
    """Rows of which some have no history; `seen` and `seen_genre` are of one length."""
    generator = torch.Generator().manual_seed(seed)
    kjt = draw_kjt(generator, tables(), rows, 4 if histories else 0)
    features = kjt.to_dict()
    lengths = features["seen"].lengths()
    genre = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    of = {name: (one.values(), one.lengths()) for name, one in features.items()} | {"seen_genre": (genre, lengths)}
    values, sizes = torch.cat([v for v, _ in of.values()]), torch.cat([n for _, n in of.values()])
    label = torch.randint(0, 2, (rows, 2), generator=generator).float()
    label[:, 1] = torch.where(label[:, 0] == 1, label[:, 1], torch.nan)  # known where the first is 1
    sparse = type(kjt)(list(of), values, lengths=sizes, stride=rows)
    return Batch(torch.randn(rows, 2, generator=generator), sparse, label)


def make(name: str, seed: int = 1, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    args = {**ARGS[name], **settings}
    return MODELS[name](tables(), 2, task_weights=[1.0, 0.5], **args, tables_device="cpu", seed=seed)


# -- layers


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("hidden", [[5], [6, 3]])
def test_target_attention_follows_its_formula_row_by_row(softmax: bool, hidden: list[int]) -> None:
    torch.manual_seed(0)
    layer = TargetAttention(4, hidden, softmax)
    lengths = torch.tensor([3, 0, 1, 5, 0])
    query, keys = torch.randn(5, 4), torch.randn(9, 4)
    out = layer(query, keys, lengths)
    for row, (q, of_row) in enumerate(zip(query, keys.split(lengths.tolist()), strict=True)):
        wanted = torch.zeros(4)
        if len(of_row):
            tiled = q.expand(len(of_row), 4)
            joined = torch.cat([tiled, of_row, tiled - of_row, tiled * of_row], dim=1)
            scores = layer.rest(torch.sigmoid(layer.first(joined)))[:, 0]
            wanted = (scores.softmax(0) if softmax else scores) @ of_row
        torch.testing.assert_close(out[row], wanted, atol=1e-6, rtol=1e-5)
    assert not layer(query, keys[:0], torch.zeros(5, dtype=torch.int64)).any()
    assert layer(query[:0], keys[:0], lengths[:0]).shape == (0, 4)


def test_a_transformer_over_history_and_target_follows_its_formula_row_by_row() -> None:
    torch.manual_seed(0)
    config = EncoderConfig(dim=6, blocks=1, heads=2, norm_first=False, causal=False)
    layer = TargetTransformer(config, 7)
    lengths, query, keys = torch.tensor([3, 0, 1, 7, 0]), torch.randn(5, 6), torch.randn(11, 6)
    out, (block,) = layer(query, keys, lengths), layer.encoder.blocks
    for row, (q, of_row) in enumerate(zip(query, keys.split(lengths.tolist()), strict=True)):
        x = torch.cat([of_row, q[None]]) + layer.positions.vectors[: len(of_row) + 1].flip(0)  # counted from the target
        q_k_v = [torch.stack(part.split(3, dim=1)) for part in block.attention.qkv(x).chunk(3, dim=1)]
        scores = q_k_v[0] @ q_k_v[1].mT / math.sqrt(3)
        attended = torch.cat(list(scores.softmax(2) @ q_k_v[2]), dim=1)
        x = block.norms[0](x + block.attention.out(attended))
        x = block.norms[1](x + block.outer(block.inner(x).relu()))
        torch.testing.assert_close(out[row], x[-1], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="a row has 9 items"):
        layer(query, torch.randn(12, 6), torch.tensor([3, 0, 1, 8, 0]))


def experts_by_hand(model: MultiTask, x: torch.Tensor) -> torch.Tensor:
    """Plain torch, one expert, gate and tower at a time, as the papers write it."""

    def mlp(stack: nn.Module, which: int, y: torch.Tensor, logits: bool) -> torch.Tensor:
        for place, (weight, bias) in enumerate(zip(stack.weights, stack.biases, strict=True)):
            y = y @ weight[which] + bias[which]
            y = y if logits and place == len(stack.weights) - 1 else y.clamp(min=0)
        return y

    inputs = [x] * (model.tasks + 1)
    for level in model.levels:
        own, shared, tasks = level.sizes.own, level.sizes.shared, level.sizes.tasks
        private = [[mlp(level.experts, t * own + e, inputs[t], False) for e in range(own)] for t in range(tasks)]
        common = [mlp(level.experts, tasks * own + e, inputs[-1], False) for e in range(shared)]
        pools = [private[t] + common for t in range(tasks)] + [[one for of in private for one in of] + common]
        following = []
        for gate, pool, of in zip(level.gates, pools, inputs, strict=False):
            shares = torch.exp(of @ gate.weight.T)
            shares = shares / shares.sum(1, keepdim=True)
            following.append(sum(shares[:, [e]] * expert for e, expert in enumerate(pool)))
        inputs = following
    return torch.cat([mlp(model.towers, t, inputs[t], True) for t in range(model.tasks)], dim=1)


@pytest.mark.parametrize(
    ("own", "shared", "levels"), [(0, 1, 1), (0, 3, 1), (0, 3, 2), (1, 1, 1), (2, 1, 2), (1, 2, 3)]
)
def test_gated_experts_are_those_of_the_papers(own: int, shared: int, levels: int) -> None:
    torch.manual_seed(0)
    sizes = ExpertSizes(tasks=3, own=own, shared=shared, layers=(7, 6))
    model = MultiTask(5, [sizes] * levels, [4])
    x = torch.randn(11, 5)
    found, wanted = model(x), experts_by_hand(model, x)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    theirs = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_logit_of_both_keeps_its_digits() -> None:
    one, other = torch.randn(2, 50, dtype=torch.float64) * 8
    both = torch.sigmoid(one) * torch.sigmoid(other)
    torch.testing.assert_close(logit_of_both(one, other), torch.logit(both), atol=1e-6, rtol=1e-6)
    large = logit_of_both(torch.tensor([90.0, -90.0]), torch.tensor([95.0, 95.0]))
    assert torch.isfinite(large).all() and large[0] > 89 and large[1] < -89


def test_histories_and_targets_that_do_not_fit_are_refused() -> None:
    for history, target, words in (
        (["seen"], ["item", "genre"], "must have equal lengths"),
        (["seen"], ["seen"], "must be a pooled feature"),
        (["seen"], ["genre"], "let one table read both"),
        (["sen"], ["item"], "no table reads 'sen'"),
        (["seen"], [None], "at least one target"),
    ):
        with pytest.raises(ValueError, match=words):
            RankerInput(tables(), 2, ModelInputs(attention=[{"history": history, "target": target}]))


def test_a_target_that_the_candidate_lacks_is_zeros() -> None:
    torch.manual_seed(0)
    settings = ModelInputs(attention=ALONE, attention_hidden=[5], tables_device="cpu", seed=1)
    inputs, rows = RankerInput(tables(), 2, settings), batch(20)
    vectors = inputs.lookup(rows.sparse)
    query = torch.cat([vectors.pooled["item"], torch.zeros(20, 12)], dim=1)
    keys = [vectors.by_id[name] for name in ("seen", "seen_genre")]
    weighed = inputs.attention[0](query, torch.cat([one.values() for one in keys], dim=1), keys[0].lengths())
    assert inputs(rows)[:, -36:].equal(weighed) and weighed.any()


# -- models


@pytest.mark.parametrize("name", list(ARGS))
def test_a_row_s_logits_do_not_depend_on_its_neighbours(name: str) -> None:
    model, rows = make(name), batch(24)
    whole = model(rows)[1]
    assert whole.shape == (24, 2)
    again = torch.cat([model(_one(rows, row))[1] for row in range(24)])
    torch.testing.assert_close(whole, again, atol=1e-6, rtol=1e-5)
    assert (rows.sparse["seen"].lengths() == 0).any() and torch.isfinite(whole).all()


def _one(rows: Batch, row: int) -> Batch:
    return micro_batch_of(rows, row, row + 1)


@pytest.mark.parametrize("name", list(ARGS))
def test_an_empty_batch_gives_no_gradient_and_all_parts_learn(name: str) -> None:
    model = make(name)
    loss, logits = model(batch(0))
    assert logits.shape == (0, 2)
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    rows = batch(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = None
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(rows)[0]
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert loss.item() < 0.4 * first


def test_candidates_of_a_request_share_its_history_and_do_not_see_each_other() -> None:
    """Rows of one history next to each other are one sequence; scores and gradients are those of rows alone."""
    model, rows = make("hstu_ranker"), batch(9)
    parts = [(rows, row) for row in (3, 3, 3, 7, 7, 1, 3, 0)]
    features = {name: [] for name in rows.sparse.keys()}
    others = batch(8, seed=5).sparse
    for place, (of, row) in enumerate(parts):
        for name in features:  # the candidates differ, all else is that of the request
            source, at = (others, place) if name in ("item", "genre") else (of.sparse, row)
            features[name].append(source[name].to_dense()[at])
    values = torch.cat([ids for lists in features.values() for ids in lists])
    lengths = torch.tensor([len(ids) for lists in features.values() for ids in lists])
    sparse = type(rows.sparse)(list(features), values, lengths=lengths, stride=8)
    page = Batch(torch.randn(8, 2), sparse, rows.label[:8].nan_to_num(0.0))

    def gradients(batches: list[Batch]) -> list[torch.Tensor]:
        model.zero_grad()
        sum(model(one)[0] * one.rows for one in batches).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with torch.no_grad():
        encoded = []
        hook = model.encoder.register_forward_pre_hook(lambda _, inputs: encoded.append(inputs[0].shape[0]))
        together, alone = model(page)[1], torch.cat([model(_one(page, row))[1] for row in range(8)])
        hook.remove()
    shared = [int(lengths_of) for lengths_of in page.sparse["seen"].lengths()[[0, 3, 5, 6, 7]]]
    assert encoded[0] == sum(shared) + 5 + 8 < sum(encoded[1:]), "a sequence each for five requests"
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    order = [2, 0, 1, 4, 3, 5, 6, 7]
    reordered = Batch(page.dense[order], _rows_of(page.sparse, order), page.label[order])
    torch.testing.assert_close(model(reordered)[1], together[order], atol=1e-6, rtol=1e-5)
    for one, other in zip(gradients([page]), gradients([_one(page, row) for row in range(8)]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _rows_of(sparse: Any, order: list[int]) -> Any:
    lists = {name: sparse[name].to_dense() for name in sparse.keys()}
    values = torch.cat([lists[name][row] for name in lists for row in order])
    lengths = torch.tensor([len(lists[name][row]) for name in lists for row in order])
    return type(sparse)(list(lists), values, lengths=lengths, stride=len(order))


def test_a_label_that_was_not_observed_changes_nothing() -> None:
    model, rows = make("mmoe"), batch(12)
    other = rows.label.clone()
    hidden = other[:, 1].isnan()
    loss = model(rows)[0]
    by_hand = nn.functional.binary_cross_entropy_with_logits(
        model(rows)[1], other.nan_to_num(0.0), reduction="none", weight=torch.tensor([1.0, 0.5])
    )
    by_hand[hidden, 1] = 0
    torch.testing.assert_close(loss, by_hand.sum() / 12)


# -- ranks


def train_plain(
    name: str, settings: dict[str, Any], batches: list[list[Batch]], params: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = make(name, **settings)
    tables_of = ("input.lookup.", "embedding_bags.")
    own = {key: value for key, value in model.named_parameters() if key.startswith(tables_of)}
    rest = [value for key, value in model.named_parameters() if not key.startswith(tables_of)]
    optimizers = [plain_twin(list(own.values()), params), torch.optim.SGD(rest, lr=0.1)]
    logits = []
    for ranks in batches:
        whole = Batch(
            torch.cat([one.dense for one in ranks]),
            join([one.sparse for one in ranks]),
            torch.cat([one.label for one in ranks]),
        )
        loss, found = model(whole)
        logits.append(found.detach())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return logits, {key: value.detach() for key, value in model.state_dict().items()}


def train_on_rank(
    group: dist.ProcessGroup,
    name: str,
    settings: dict[str, Any],
    batches: list[list[Batch]],
    params: dict[str, Any],
    kinds: list[str],
    dedup: bool,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    ranks = list(range(group.size()))
    plan = {}
    for path, module in make(name, **settings).named_modules():
        configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
        if configs is not None:
            plan[path] = {
                table.name: cut(
                    table, ShardingType(kind), [ranks[-1]] if kind == ShardingType.TABLE_WISE.value else ranks
                )
                for table, kind in zip(configs(), kinds[len(plan) :] + kinds, strict=False)
            }
    sharders = [EmbeddingBagCollectionSharder(params, dedup=dedup), EmbeddingCollectionSharder(params, dedup=dedup)]
    env = ShardingEnv.from_process_group(group)
    model = DistributedModelParallel(make(name, **settings), env, DEVICE, ShardingPlan(plan), sharders)
    optimizer = torch.optim.SGD(list(model.dense_parameters().values()), lr=0.1)
    logits = []
    for of_ranks in batches:
        own, total = of_ranks[group.rank()], sum(one.rows for one in of_ranks)
        optimizer.zero_grad()
        loss, found = model(own)
        weighed = loss * (own.rows / total * group.size()) if own.rows else found.sum() * 0.0
        weighed.backward()
        optimizer.step()
        logits.append(found.detach())
    dense = {key: value.detach().clone() for key, value in model.other_parameters().items()}
    return logits, dense | {key: value for key, value in model.named_buffers() if "running" in key}


ROWS = {1: [(5,), (3,), (4,)], 2: [(5, 2), (0, 4), (3, 3)], 3: [(4, 0, 3), (1, 5, 2), (0, 0, 4)]}


OF_ALL_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("din", {"activation": "dice", "attention_activation": "dice", "numbers": "periodic", "number_dim": 3}),
    ("mmoe", {"activation": "gelu", "norm": "batch", "numbers": "piecewise"}),
    ("ple", {"activation": "prelu", "norm": "layer", "numbers": "linear"}),
]
RUNS = [*((name, 3, {}) for name in ARGS), ("din", 1, {}), ("ple", 2, {})]


@pytest.mark.parametrize(("name", "size", "settings"), RUNS + [(name, 3, settings) for name, settings in OF_ALL_RANKS])
def test_any_number_of_ranks_trains_the_same_model(name: str, size: int, settings: dict[str, Any]) -> None:
    """Also with empty ranks, and a rank of which no row has a history; buffers, too, such as running averages."""
    batches = [
        [batch(rows, seed=10 * step + rank, histories=rank != step) for rank, rows in enumerate(of_ranks)]
        for step, of_ranks in enumerate(ROWS[size])
    ]
    for number, params in enumerate((SGD, ADAGRAD, ROWWISE, ADAM)):
        kinds = [ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value, ShardingType.DATA_PARALLEL.value]
        if params is not ROWWISE:
            kinds[2] = ShardingType.COLUMN_WISE.value
        kinds = kinds[number % 3 :] + kinds[: number % 3]
        logits, weights = train_plain(name, settings, batches, params)
        answers = on_ranks(size, train_on_rank, name, settings, batches, params, kinds, number % 2 == 1)
        for step, wanted in enumerate(logits):
            torch.testing.assert_close(torch.cat([one[0][step] for one in answers]), wanted, atol=1e-5, rtol=1e-5)
        for _, dense in answers:
            assert any("running_mean" in key for key in dense) == (settings.get("activation") in ("dice", "gelu"))
            for key, value in dense.items():
                torch.testing.assert_close(value, weights[key], atol=1e-5, rtol=1e-5)
