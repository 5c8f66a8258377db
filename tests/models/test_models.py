"""The built-in models: formulas spelled out, gradients, empty batches, seeds, wrong settings, sharded training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.models import DCN, DLRM, MODELS, Batch, DeepFM
from rayrec.models.interaction import InteractionArch
from rayrec.modules import EmbeddingBagConfig
from tests.distributed.oracle import cut, draw_kjt, join
from tests.ranks import on_ranks

DIM = 8
ARGS: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_arch": [6, DIM], "over_arch": [5, 1]},
    "dcn": {"dense_arch": [6, DIM], "over_arch": [5, 1], "cross_layers": 2, "cross_rank": 3},
    "deepfm": {"deep_arch": [6, 1]},
    "wide_deep": {"deep_arch": [6, 1]},
    "autoint": {"layers": 2, "heads": 2, "head_dim": 3, "deep_arch": [6, 1]},
    "masknet": {"over_arch": [5, 1], "blocks": 2, "block_dim": 7, "reduction": 0.5},
    "finalmlp": {"first": [7, 6], "second": [6], "first_context": ["user"], "gate": [5], "heads": 2},
    "xdeepfm": {"deep_arch": [6, 1], "cin": [4, 3]},
    "gdcn": {"over_arch": [5, 1], "cross_layers": 2, "deep_arch": [4]},
    "wukong": {"over_arch": [5, 1], "fm_vectors": 3, "linear_vectors": 2, "rank": 4, "fm_hidden": [6]},
}
LAST = {name: next((arg for arg in ("over_arch", "deep_arch") if arg in args), None) for name, args in ARGS.items()}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="user", num_embeddings=20, embedding_dim=DIM, feature_names=["user"]),
        EmbeddingBagConfig(name="item", num_embeddings=30, embedding_dim=DIM, feature_names=["item", "liked"]),
    ]


def make(name: str, num_dense: int = 3, seed: int = 1, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](tables(), num_dense, **{**ARGS[name], **settings}, tables_device="cpu", seed=seed)


def batch(rows: int, num_dense: int = 3, seed: int = 0, weighted: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, num_dense, generator=generator),
        draw_kjt(generator, tables(), rows, 3, weighted),
        torch.randint(0, 2, (rows,), generator=generator).float(),
    )


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, and notes the streams that it is recorded on."""

    is_cuda = True
    noted: list[tuple[int, Any]] = []  # noqa: RUF012

    def record_stream(self, stream: Any) -> None:
        self.noted.append((self.data_ptr(), stream))


def test_every_tensor_of_a_batch_is_recorded_on_a_stream() -> None:
    """As a pipeline does on a GPU, where a tensor that is left out may be overwritten while the stream reads it."""
    plain = replace(batch(4, weighted=True), weight=torch.ones(4), group=torch.arange(4), time=torch.arange(4))
    plain.record_stream("no stream")  # type: ignore[arg-type]  # tensors of the host belong to none
    ids = plain.sparse
    moved = [part.as_subclass(OnGpu) for part in (ids.values(), ids.weights(), ids.lengths())]
    sparse = type(ids)(ids.keys(), moved[0], moved[1], lengths=moved[2], stride=ids.stride())
    others = ("dense", "label", "weight", "group", "time")
    rows = replace(plain, sparse=sparse, **{name: getattr(plain, name).as_subclass(OnGpu) for name in others})
    stream: Any = object()
    rows.record_stream(stream)
    parts = [*moved, *(getattr(rows, name) for name in others)]
    assert {(part.data_ptr(), stream) for part in parts} <= set(OnGpu.noted)


def loss_by_hand(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    click = torch.sigmoid(logits)
    return -(label * click.log() + (1 - label) * (1 - click).log()).mean()


@pytest.mark.parametrize("name", list(ARGS))
def test_loss_and_logits_have_their_shapes_and_every_parameter_its_gradient(name: str) -> None:
    model, rows = make(name), batch(16)
    loss, logits = model(rows)
    assert loss.shape == () and logits.shape == (16,) and logits.dtype == torch.float32
    torch.testing.assert_close(loss, loss_by_hand(logits, rows.label))
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert sum(float(p.grad.abs().sum()) > 0 for p in model.parameters()) == len(list(model.parameters()))


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("name", list(ARGS))
def test_an_empty_batch_has_no_loss_and_gradients_of_zero(name: str, num_dense: int) -> None:
    model = make(name, num_dense)
    loss, logits = model(batch(0, num_dense))
    assert logits.shape == (0,) and loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert torch.isfinite(model(batch(1, num_dense))[0])


@pytest.mark.parametrize("name", list(ARGS))
def test_a_seed_decides_every_first_weight(name: str) -> None:
    first, again, other = (make(name, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", list(ARGS))
def test_weighted_ids_count_by_their_weight(name: str) -> None:
    model, rows = make(name, is_weighted=True), batch(6, weighted=True)
    plain = make(name)
    ones = Batch(rows.dense, rows.sparse.with_weights(torch.ones(rows.sparse.values().numel())), rows.label)
    without = Batch(rows.dense, rows.sparse.with_weights(None), rows.label)
    torch.testing.assert_close(model(ones)[1], plain(without)[1])
    assert not torch.allclose(model(rows)[1], model(ones)[1])


@pytest.mark.parametrize("name", list(ARGS))
def test_the_models_learn(name: str) -> None:
    model, rows = make(name), batch(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = model(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def fields(model: nn.Module, rows: Batch) -> list[list[torch.Tensor]]:
    """Each example's pooled vectors, one feature at a time."""
    bags = getattr(model, "embedding_bags", None) or model.input.lookup.bags
    out = []
    for table in tables():
        weight = bags.embedding_bags[table.name].weight
        for feature in table.feature_names:
            out.append([weight[ids].sum(0) for ids in rows.sparse[feature].to_dense()])
    return [list(example) for example in zip(*out, strict=True)]


def fields_with_numbers(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Each example's vectors, of its numbers first: `[F, D]`."""
    linear = model.input.number_vectors
    return [
        torch.stack([*(x[n] * linear.weight_ND[n] + linear.bias_ND[n] for n in range(len(x))), *vectors])
        for x, vectors in zip(rows.dense, fields(model, rows), strict=True)
    ]


def dlrm_by_hand(model: DLRM, rows: Batch) -> list[torch.Tensor]:
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        dense = model.dense_arch(x[None])[0]
        every = [dense, *vectors]
        dots = [every[i] @ every[j] for i in range(len(every)) for j in range(i + 1, len(every))]
        logits.append(model.over_arch(torch.cat([dense, torch.stack(dots)])[None])[0, 0])
    return logits


def dcn_by_hand(model: DCN, rows: Batch) -> list[torch.Tensor]:
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        x0 = torch.cat([model.dense_arch(x[None])[0], *vectors])
        crossed = x0
        for down, up, bias in zip(model.cross.V_kernels, model.cross.W_kernels, model.cross.bias, strict=True):
            crossed = x0 * (up @ (down @ crossed) + bias) + crossed
        logits.append(model.over_arch(crossed[None])[0, 0])
    return logits


def deepfm_by_hand(model: DeepFM, rows: Batch) -> list[torch.Tensor]:
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        every = [*vectors, *(value * vector for value, vector in zip(x, model.dense_vectors_ND, strict=True))]
        logit = model.bias + sum(u @ v for u, v in zip(model.projection_FD, every, strict=True))
        for i in range(len(every)):
            for j in range(i + 1, len(every)):
                logit = logit + every[i] @ every[j]
        logits.append(logit + model.deep(torch.cat(every)[None])[0, 0])
    return logits


def wide_deep_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        every = torch.cat([x, *vectors])
        logits.append(model.wide.weight[0] @ every + model.wide.bias[0] + model.deep(every[None])[0, 0])
    return logits


def autoint_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Equations 5 to 8 of the paper, one head and field at a time."""
    logits = []
    for e in fields_with_numbers(model, rows):
        deep = model.deep(e.flatten()[None])[0, 0]
        for layer in model.layers:
            query, key, value, residual = layer.weight.split(6)
            outputs = []
            for m in range(len(e)):
                heads = []
                for head in (slice(0, 3), slice(3, 6)):
                    psi = torch.stack([(query[head] @ e[m]) @ (key[head] @ e[k]) for k in range(len(e))])
                    alpha = psi.exp() / psi.exp().sum()
                    heads.append(sum(alpha[k] * (value[head] @ e[k]) for k in range(len(e))))
                outputs.append(torch.relu(torch.cat(heads) + residual @ e[m]))
            e = torch.stack(outputs)
        logits.append(model.logits.weight[0] @ e.flatten() + model.logits.bias[0] + deep)
    return logits


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * weight + bias


def masknet_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Equations 3 to 10 of the paper; parallel or serial."""
    logits = []
    for e in fields_with_numbers(model, rows):
        normed = [layer_norm(f, w, b) for f, w, b in zip(e, model.norm.weight, model.norm.bias, strict=True)]
        v_emb, blocks = e.flatten(), [torch.cat(normed)]
        for (first, _, second), layer, norm in zip(model.masks, model.layers, model.norms, strict=True):
            mask = second.weight @ torch.relu(first.weight @ v_emb + first.bias) + second.bias
            masked = layer.weight @ (mask * blocks[0 if model.parallel else -1])
            blocks.append(torch.relu(layer_norm(masked, norm.weight, norm.bias)))
        logits.append(model.over_arch((torch.cat(blocks[1:]) if model.parallel else blocks[-1])[None])[0, 0])
    return logits


def finalmlp_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Equations 5 to 9 of the paper: the first gate reads the user, the second a learned vector."""
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        every = torch.cat([x, *vectors])
        contexts = [vectors[0], model.gates[1].vector[0]]
        gated = [
            every * 2 * torch.sigmoid(gate.mlp(context[None])[0])
            for gate, context in zip(model.gates, contexts, strict=True)
        ]
        a, b = (stream(part[None])[0] for stream, part in zip(model.streams, gated, strict=True))
        logit = model.linear.bias[0] + model.linear.weight[0, :6] @ a + model.linear.weight[0, 6:] @ b
        for head in range(2):
            part = slice(3 * head, 3 * head + 3)
            logit = logit + a[part] @ model.bilinear[head] @ b[part]
        logits.append(logit)
    return logits


def xdeepfm_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Equation 6 of the paper, one vector at a time."""
    logits = []
    for e in fields_with_numbers(model, rows):
        x, pooled = e, [e.flatten()]
        for layer in model.cin:
            weight = layer.weight.unflatten(1, (len(x), len(e)))
            x = torch.stack([sum(w[i, j] * x[i] * e[j] for i in range(len(x)) for j in range(len(e))) for w in weight])
            pooled.append(x.sum(1))
        linear = model.linear.weight[0] @ torch.cat(pooled) + model.linear.bias[0]
        logits.append(linear + model.deep(e.flatten()[None])[0, 0])
    return logits


def gdcn_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    logits = []
    for x, vectors in zip(rows.dense, fields(model, rows), strict=True):
        c = c_0 = torch.cat([x, *vectors])
        for cross, gate in zip(model.crosses, model.gates, strict=True):
            c = c_0 * (cross.weight @ c + cross.bias) * torch.sigmoid(gate.weight @ c) + c
        logits.append(model.over_arch(torch.cat([c, model.deep(c_0[None])[0]])[None])[0, 0])
    return logits


def wukong_by_hand(model: nn.Module, rows: Batch) -> list[torch.Tensor]:
    """Equations 1 to 5 of the paper with X [F, D]."""
    logits = []
    for x in fields_with_numbers(model, rows):
        for layer in model.layers:
            products = (x @ x.T @ layer.rank.weight.T).flatten()
            normed = layer_norm(products, layer.norm_products.weight, layer.norm_products.bias)
            fm = layer.fm(layer.mlp(normed[None]))[0].view(3, DIM)
            same = isinstance(layer.residual, nn.Identity)
            summed = torch.cat([fm, layer.linear.weight @ x]) + (x if same else layer.residual.weight @ x)
            x = torch.stack([layer_norm(row, layer.norm.weight, layer.norm.bias) for row in summed])
        logits.append(model.over_arch(x.flatten()[None])[0, 0])
    return logits


BY_HAND: dict[str, Callable[..., list[torch.Tensor]]] = {
    "dlrm": dlrm_by_hand,
    "dcn": dcn_by_hand,
    "deepfm": deepfm_by_hand,
    "wide_deep": wide_deep_by_hand,
    "autoint": autoint_by_hand,
    "masknet": masknet_by_hand,
    "finalmlp": finalmlp_by_hand,
    "xdeepfm": xdeepfm_by_hand,
    "gdcn": gdcn_by_hand,
    "wukong": wukong_by_hand,
}


@pytest.mark.parametrize("name", list(ARGS))
def test_each_model_follows_its_formula(name: str) -> None:
    model, rows = make(name), batch(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    torch.testing.assert_close(model(rows)[1], torch.stack(BY_HAND[name](model, rows)), atol=1e-4, rtol=1e-4)


def test_mask_blocks_in_series_read_the_block_before() -> None:
    model, rows = make("masknet", parallel=False), batch(7)
    torch.testing.assert_close(model(rows)[1], torch.stack(masknet_by_hand(model, rows)), atol=1e-5, rtol=1e-5)


def test_wide_features_are_in_the_wide_part_alone() -> None:
    model, rows = make("wide_deep", wide=["item"]), batch(7)
    expected = []
    for x, (user, item, liked) in zip(rows.dense, fields(model, rows), strict=True):
        deep = model.deep(torch.cat([x, user, liked])[None])[0, 0]
        expected.append(model.wide.weight[0] @ item + model.wide.bias[0] + deep)
    torch.testing.assert_close(model(rows)[1], torch.stack(expected))


def test_deepfm_has_the_papers_weight_of_each_id_from_tables_of_dim_1() -> None:
    weights = EmbeddingBagConfig(name="w", num_embeddings=30, embedding_dim=1, feature_names=["item", "liked"])
    wide = ["item@w", "liked@w"]
    torch.manual_seed(1)
    model = DeepFM([tables()[0], weights, tables()[1]], 3, deep_arch=[6, 1], wide=wide, tables_device="cpu")
    rows = batch(7)
    assert model.projection_FD.shape == (3, DIM)
    user, first, _, item, liked = model.embedding_bags(rows.sparse).values().split([DIM, 1, 1, DIM, DIM], dim=1)
    second = model.embedding_bags(rows.sparse).values()[:, DIM + 1]
    expected = []
    for i, x in enumerate(rows.dense):
        every = [user[i], item[i], liked[i], *(v * of for v, of in zip(x, model.dense_vectors_ND, strict=True))]
        logit = (
            model.bias
            + first[i, 0]
            + second[i]
            + sum(u @ v for u, v in zip(model.projection_FD, every[3:], strict=True))
        )
        logit = logit + sum(every[a] @ every[b] for a in range(6) for b in range(a + 1, 6))
        expected.append(logit + model.deep(torch.cat(every)[None])[0, 0])
    torch.testing.assert_close(model(rows)[1], torch.stack(expected))


@pytest.mark.parametrize("name", ["deepfm", "xdeepfm"])
def test_own_weights_of_ids_are_those_of_all_tables_of_dim_1(name: str) -> None:
    own = EmbeddingBagConfig(name="w", num_embeddings=30, embedding_dim=1, feature_names=["item", "liked"])
    for names in (["item@w"], ["item@item", "item@w", "liked@w"]):
        with pytest.raises(ValueError, match=f"{name}: .* must be all features of the tables of dim 1, and no others"):
            MODELS[name]([*tables(), own], 3, deep_arch=[1], wide=names)
    with pytest.raises(ValueError, match=f"{name}: number_dim=5 must be the embedding_dim 8, or null"):
        wide = ["item@w", "liked@w"]
        MODELS[name]([*tables(), own], 3, deep_arch=[1], wide=wide, numbers="linear", number_dim=5)


def test_xdeepfm_has_the_papers_weight_of_each_id_from_tables_of_dim_1() -> None:
    """The weights are added to a model that projects numbers alone."""
    own = EmbeddingBagConfig(name="w", num_embeddings=30, embedding_dim=1, feature_names=["item", "liked"])
    args = {**ARGS["xdeepfm"], "wide": ["item@w", "liked@w"], "tables_device": "cpu"}
    model, rows = MODELS["xdeepfm"]([tables()[0], own, tables()[1]], 3, **args), batch(7)
    user, weights, vectors = model.input.lookup.bags(rows.sparse).values().split([DIM, 2, 2 * DIM], dim=1)
    expected = []
    for i, numbers in enumerate(model.input.number_vectors(rows.dense)):
        e = x = torch.cat([numbers, torch.cat([user[i], vectors[i]]).view(-1, DIM)])
        pooled = [numbers.flatten()]
        for layer in model.cin:
            weight = layer.weight.unflatten(1, (len(x), len(e)))
            x = torch.einsum("oij,id,jd->od", weight, x, e)
            pooled.append(x.sum(1))
        linear = model.linear.weight[0] @ torch.cat(pooled) + model.linear.bias[0]
        expected.append(weights[i].sum() + linear + model.deep(e.flatten()[None])[0, 0])
    torch.testing.assert_close(model(rows)[1], torch.stack(expected))


def test_a_dcn_may_have_full_crosses_raw_dense_features_and_tables_of_any_width() -> None:
    wide = [*tables(), EmbeddingBagConfig(name="c", num_embeddings=4, embedding_dim=4, feature_names=["c"])]
    model = DCN(wide, 3, dense_arch=[], over_arch=[1], cross_rank=0, tables_device="cpu")
    assert model.cross.kernels[0].shape == (3 + 3 * DIM + 4,) * 2
    generator = torch.Generator().manual_seed(0)
    rows = Batch(torch.ones(5, 3), draw_kjt(generator, wide, 5, 2), torch.ones(5))
    assert model(rows)[1].shape == (5,)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dlrm", {"dense_arch": [4]}, r"dlrm: dense_arch=\[4\] must end with the embedding_dim 8"),
        ("dlrm", {"over_arch": [4]}, r"dlrm: over_arch=\[4\] must end with 1, the logit"),
        ("dcn", {"over_arch": []}, r"dcn: over_arch=\[\] must end with 1, the logit"),
        ("dcn", {"cross_rank": -1}, "dcn: cross_rank=-1 must be positive, or 0"),
        ("dcn", {"cross_layers": 0}, "num_layers=0 must be at least 1"),
        ("deepfm", {"deep_arch": [2]}, r"deepfm: deep_arch=\[2\] must end with 1, the logit"),
        ("wide_deep", {"wide": ["itm"]}, "wide_deep: wide: 'itm' is not a pooled feature; these are user, item, liked"),
        ("finalmlp", {"heads": 4}, "heads=4 must divide the last widths"),
        ("autoint", {"layers": 0}, "autoint: layers=0 must be at least 1"),
        ("wukong", {"number_dim": 5}, "wukong: number_dim=5 must be the embedding_dim 8, or null"),
        ("gdcn", {"activation": "tanh"}, "unknown activation 'tanh'; use one of relu"),
        ("dcn", {"task_weights": [1.0, 1.0]}, r"dcn: over_arch=\[5, 1\] must end with 2, one logit per label"),
    ],
)
def test_settings_that_do_not_fit_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "autoint", "masknet", "xdeepfm", "wukong"])
def test_tables_of_several_widths_are_named(name: str) -> None:
    unlike = [*tables(), EmbeddingBagConfig(name="c", num_embeddings=4, embedding_dim=4, feature_names=["c"])]
    with pytest.raises(ValueError, match=f"{name}: all tables need the same embedding_dim; they have .*'c': 4"):
        MODELS[name](unlike, 3, **ARGS[name])


def parts(world: int) -> list[list[Batch]]:
    return [[batch(3 + 2 * rank, seed=10 * step + rank) for rank in range(world)] for step in range(3)]


def train_on_rank(group: dist.ProcessGroup, name: str, kinds: tuple[str, str]) -> dict[str, torch.Tensor]:
    plan = {
        table.name: cut(table, ShardingType(kind), [1] if kind == ShardingType.TABLE_WISE.value else [0, 1])
        for table, kind in zip(tables(), kinds, strict=True)
    }
    plain = make(name)
    path = "input.lookup.bags" if plain.input.lookup.bags is not None else "embedding_bags"
    model = DistributedModelParallel(
        plain,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: plan}),
        sharders=[EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})],
    )
    optimizer = torch.optim.SGD(model.dense_parameters().values(), lr=0.1)
    for step in parts(group.size()):
        optimizer.zero_grad()
        mine = step[group.rank()]
        loss, _ = model(mine)
        (loss * mine.rows * group.size() / sum(part.rows for part in step)).backward()
        optimizer.step()
    return {key: value.detach() for key, value in model.dense_parameters().items()}


MIXED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value)
OF_ONE_KIND = [
    (kind.value, kind.value)
    for kind in (
        ShardingType.DATA_PARALLEL,
        ShardingType.TABLE_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.ROW_WISE,
    )
]


@pytest.mark.parametrize(
    ("name", "kinds"), [*((name, MIXED) for name in ARGS), *(("masknet", kinds) for kinds in OF_ONE_KIND)]
)
def test_two_ranks_train_as_one_process(name: str, kinds: tuple[str, str]) -> None:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in parts(2):
        optimizer.zero_grad()
        whole = Batch(
            torch.cat([part.dense for part in step]),
            join([part.sparse for part in step]),
            torch.cat([part.label for part in step]),
        )
        model(whole)[0].backward()
        optimizer.step()
    expected = dict(model.named_parameters())
    for answer in on_ranks(2, train_on_rank, name, kinds):
        assert set(answer) == {key for key in expected if ".embedding_bags." not in f".{key}"}
        for key, value in answer.items():
            torch.testing.assert_close(value, expected[key].detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", list(ARGS))
def test_several_labels_have_a_logit_each_and_one_loss(name: str) -> None:
    """Σ w (Σ task weight × loss, where it was observed) / Σ w; the second label of half of the rows was not."""
    last = {LAST[name]: [5, 2]} if LAST[name] else {}
    model, rows = make(name, task_weights=[1.0, 0.25], **last), batch(8)
    label = torch.stack([rows.label, 1 - rows.label], dim=1)
    label[::2, 1] = torch.nan
    weight = torch.arange(8.0)
    loss, logits = model(replace(rows, label=label, weight=weight))
    assert logits.shape == (8, 2) and not torch.equal(logits[:, 0], logits[:, 1])
    expected = torch.zeros(())
    for row in range(8):
        for task, scale in enumerate([1.0, 0.25]):
            if not label[row, task].isnan():
                expected = expected + weight[row] * scale * loss_by_hand(logits[row, task], label[row, task])
    torch.testing.assert_close(loss, expected / weight.sum())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", list(ARGS))
def test_weights_count_rows(name: str) -> None:
    """A weight of 2 is a row twice, a weight of 0 none; weights that are all 0 move nothing."""
    model, rows = make(name), batch(6)
    weights = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    loss, logits = model(replace(rows, weight=weights))
    torch.testing.assert_close(loss, loss_by_hand(logits[[0, 0, 1, 3, 5]], rows.label[[0, 0, 1, 3, 5]]))
    nothing, _ = model(replace(rows, weight=torch.zeros(6)))
    nothing.backward()
    assert nothing == 0.0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("lower", [False, True], ids=["fp32", "autocast"])
def test_pairs_meet_as_the_formula_says_forward_and_backward(lower: bool) -> None:
    dense, sparse = (torch.randn(shape, dtype=torch.float64 if not lower else None) for shape in ((4, 8), (4, 3, 8)))
    grad = torch.randn(4, 8 + 6, dtype=dense.dtype)

    def formula(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([dense[:, None], sparse], dim=1)
        pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
        return torch.cat([dense, torch.stack(pairs, dim=1)], dim=1)

    results = []
    for way in (InteractionArch(3), formula):
        given = dense.clone().requires_grad_(), sparse.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            out = way(*given)
        results.append([out, *torch.autograd.grad(out, given, grad.to(out.dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **({"rtol": 0.05, "atol": 0.1} if lower else {}))
