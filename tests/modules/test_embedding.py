"""The unsharded collections against rows picked and pooled by hand, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
    init,
)
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.models.deepfm import SimpleDeepFMNN
from rayrec.torchrec.models.dlrm import DLRM
from tests.distributed.oracle import draw_kjt

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


def bag_tables(pooling: PoolingType = SUM, data_type: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    """A feature of its own, a table read by two features, and a feature read by two tables."""
    common: dict[str, Any] = {"pooling": pooling, "data_type": data_type}
    return [
        EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "shared"], **common),
        EmbeddingBagConfig(name="u", num_embeddings=5, embedding_dim=8, feature_names=["shared", "b"], **common),
    ]


def by_hand(ebc: EmbeddingBagCollection, kjt: KeyedJaggedTensor, weighted: bool) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    configs = ebc.embedding_bag_configs()
    readers = [f for config in configs for f in config.feature_names]
    for config in configs:
        table = ebc.embedding_bags[config.name].weight.float()
        for feature in config.feature_names:
            bags = []
            weights = kjt[feature].to_dense_weights() if weighted else None
            for place, ids in enumerate(kjt[feature].to_dense()):
                rows = [
                    table[i] * (weights[place][n] if weights is not None else 1) for n, i in enumerate(ids.tolist())
                ]
                bag = sum(rows, torch.zeros(config.embedding_dim))
                bags.append(bag / max(1, len(rows)) if config.pooling is MEAN else bag)
            name = feature if readers.count(feature) == 1 else f"{feature}@{config.name}"
            out[name] = torch.stack(bags) if bags else torch.zeros(0, config.embedding_dim)
    return out


@settings(max_examples=40)
@given(
    st.sampled_from([SUM, MEAN]),
    st.sampled_from([DataType.FP32, DataType.FP16, DataType.BF16]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_bags_are_pooled_rows(
    pooling: PoolingType, data_type: DataType, weighted: bool, batch: int, longest: int, seed: int
) -> None:
    tables = bag_tables(pooling, data_type)
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    kjt = draw_kjt(torch.Generator().manual_seed(seed), tables, batch, longest, weighted)
    found = ebc(kjt)
    assert found.keys() == ["a", "shared@t", "shared@u", "b"]
    assert found.values().dtype == torch.float32
    near = 1e-5 if data_type is DataType.FP32 else 2e-2  # half formats add up in their own precision
    for name, expected in by_hand(ebc, kjt, weighted).items():
        torch.testing.assert_close(found[name], expected.detach(), atol=near, rtol=near)


@pytest.mark.parametrize("pooling", [SUM, MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_reach_exactly_the_rows_that_were_read(pooling: PoolingType, weighted: bool) -> None:
    tables = bag_tables(pooling)
    kjt = draw_kjt(torch.Generator().manual_seed(2), tables, 4, 3, weighted)
    ours, theirs = (EmbeddingBagCollection(tables, is_weighted=weighted, seed=1) for _ in range(2))
    factors = torch.linspace(-1, 1, 24)
    (ours(kjt).values() * factors).sum().backward()
    (torch.cat(list(by_hand(theirs, kjt, weighted).values()), dim=1) * factors).sum().backward()
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, yours.grad)


def test_batch_sizes_that_vary_by_feature_are_expanded() -> None:
    tables = bag_tables()
    kjt = KeyedJaggedTensor(
        ["shared", "a", "b"],
        torch.tensor([1, 2, 3, 0, 8, 4]),
        lengths=torch.tensor([2, 1, 1, 0, 1, 1]),
        stride_per_key_per_rank=[[2], [3], [1]],
        inverse_indices=(["a", "b", "shared"], torch.tensor([[2, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]])),
    )
    ebc = EmbeddingBagCollection(tables, seed=0)
    torch.testing.assert_close(ebc(kjt).values(), ebc(kjt.expanded()).values())
    without = KeyedJaggedTensor(
        kjt.keys(), kjt.values(), lengths=kjt.lengths(), stride_per_key_per_rank=kjt.stride_per_key_per_rank()
    )
    with pytest.raises(ValueError, match="batch sizes differ by key"):
        ebc(without)


def test_sequences_are_rows_one_by_one() -> None:
    tables = [
        EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "shared"]),
        EmbeddingConfig(name="u", num_embeddings=5, embedding_dim=4, feature_names=["shared"], data_type=DataType.BF16),
    ]
    ec = EmbeddingCollection(tables, seed=1, need_indices=True)
    kjt = KeyedJaggedTensor(["a", "shared"], torch.tensor([8, 1, 4, 4]), lengths=torch.tensor([1, 1, 0, 2]))
    found = ec(kjt)
    assert list(found) == ["a", "shared@t", "shared@u"]
    assert ec.embedding_dim() == 4 and ec.need_indices()
    for name, table, ids in (("a", "t", [8, 1]), ("shared@t", "t", [4, 4]), ("shared@u", "u", [4, 4])):
        expected = ec.embeddings[table].weight[torch.tensor(ids)].float()
        assert torch.equal(found[name].values(), expected) and found[name].values().dtype == torch.float32
        assert found[name].weights().tolist() == ids
    assert found["shared@t"].lengths().tolist() == [0, 2]


def test_first_weights_come_from_seed_and_name_alone() -> None:
    first, same = (EmbeddingBagCollection(tables, seed=4) for tables in (bag_tables(), bag_tables()[::-1]))
    for name in ("t", "u"):
        assert torch.equal(first.embedding_bags[name].weight, same.embedding_bags[name].weight)
    bound = (1 / 9) ** 0.5
    weight = first.embedding_bags["t"].weight.detach()
    assert weight.abs().max() <= bound and weight.std() == pytest.approx(bound / 3**0.5, rel=0.4)
    torch.manual_seed(1)
    one, two = EmbeddingBagCollection(bag_tables()), EmbeddingBagCollection(bag_tables())
    torch.manual_seed(1)
    again = EmbeddingBagCollection(bag_tables())
    assert one.seed == again.seed != two.seed


def test_any_rectangle_starts_as_its_part_of_the_whole() -> None:
    """Rows are filled in blocks of a million numbers: three here, and the last one shorter."""
    dim = (1 << 20) // 3
    for fill in (None, lambda block: nn.init.normal_(block, std=2.0)):
        config = EmbeddingBagConfig(name="x", num_embeddings=10, embedding_dim=dim, feature_names=["f"], init_fn=fill)
        whole = torch.empty(10, dim)
        init.fill(whole, config, seed=3)
        for rows, cols in (((0, 10), (4, 8)), ((2, 7), (0, 4)), ((9, 10), (0, dim)), ((5, 5), (0, 8))):
            part = torch.empty(rows[1] - rows[0], cols[1] - cols[0])
            init.fill(part, config, 3, rows, cols)
            assert torch.equal(part, whole[slice(*rows), slice(*cols)])


def test_an_init_fn_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    config = EmbeddingBagConfig(
        name="x", num_embeddings=3, embedding_dim=4, feature_names=["f"], init_fn=lambda block: block.fill_(7)
    )
    assert (EmbeddingBagCollection([config], seed=1).embedding_bags["x"].weight == 7).all()
    assert torch.equal(torch.rand(1), expected)


def test_a_collection_is_one_node_of_a_traced_model_and_has_a_shape_on_meta() -> None:
    tables = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=[f"f{n}"]) for n in "ab"]
    kjt = KeyedJaggedTensor(["fa", "fb"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    model = SimpleDeepFMNN(3, EmbeddingBagCollection(tables), 4, 2)
    assert torch.equal(torch.fx.symbolic_trace(model)(torch.ones(2, 3), kjt), model(torch.ones(2, 3), kjt))
    ids = DLRM(EmbeddingBagCollection(tables), 3, [4], [4, 1])
    assert torch.equal(torch.fx.symbolic_trace(ids)(torch.ones(2, 3), kjt), ids(torch.ones(2, 3), kjt))
    pooled = EmbeddingBagCollection(tables, device="meta")(kjt.to("meta").sync())
    assert (pooled.keys(), pooled.values().shape) == (["fa", "fb"], (2, 8))


def test_meta_collections_hold_nothing_until_they_are_filled() -> None:
    ebc = EmbeddingBagCollection(bag_tables(), device="meta", seed=2)
    assert ebc.device.type == "meta" and all(p.is_meta for p in ebc.parameters())
    ebc.to_empty(device="cpu").reset_parameters()
    assert torch.equal(
        ebc.embedding_bags["t"].weight, EmbeddingBagCollection(bag_tables(), seed=2).embedding_bags["t"].weight
    )


def config(**changes: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"name": "t", "num_embeddings": 3, "embedding_dim": 4, "feature_names": ["f"], **changes}
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(embedding_dim=0), "table 't': embedding_dim=0 must be at least 1"),
        (lambda: EmbeddingBagCollection([]), "has no tables"),
        (lambda: EmbeddingBagCollection([config(data_type=DataType.INT8)]), "data_type INT8 cannot be trained"),
        (lambda: config(num_embeddings=0), "table 't': num_embeddings=0 must be at least 1"),
        (lambda: EmbeddingBagCollection([config(name="")]), "table '': every table needs a unique name"),
        (lambda: EmbeddingBagCollection([config(), config()]), "table 't': every table needs a unique name"),
        (lambda: EmbeddingBagCollection([config(feature_names=[])]), "table 't': feature_names is empty"),
        (lambda: EmbeddingBagCollection([config(feature_names=["f", "f"])]), "table 't': feature_names has duplicates"),
        (lambda: EmbeddingBagCollection([config(name="items")]), "table 'items': torch cannot hold a submodule"),
        (lambda: EmbeddingBagCollection([config(name="a.b")]), "call it 'a_b'"),
        (lambda: EmbeddingBagCollection([config(pooling=PoolingType.NONE)]), "table 't': pooling must be SUM or MEAN"),
        (
            lambda: EmbeddingBagCollection([config()])(
                KeyedJaggedTensor(["x"], torch.arange(1), lengths=torch.tensor([1]))
            ),
            r"no feature 'f', which a table reads; it has \['x'\]",
        ),
        (
            lambda: EmbeddingBagCollection([config()], is_weighted=True)(
                KeyedJaggedTensor(["f"], torch.arange(1), lengths=torch.tensor([1]))
            ),
            "the collection is weighted, but the input has no weights",
        ),
        (
            lambda: EmbeddingBagCollection([config()])(
                KeyedJaggedTensor(["f"], torch.tensor([1, 3]), lengths=torch.tensor([2]))
            ),
            r"feature 'f': id 3 is outside the rows \[0, 3\) of table 't'",
        ),
        (
            lambda: EmbeddingBagCollection([config()], is_weighted=True)(
                KeyedJaggedTensor(["f"], torch.tensor([1, -1]), torch.ones(2), torch.tensor([2]))
            ),
            r"feature 'f': id -1 is outside the rows \[0, 3\) of table 't'",
        ),
        (
            lambda: EmbeddingCollection(
                [EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=["f"])]
            )(KeyedJaggedTensor(["f"], torch.tensor([7]), lengths=torch.tensor([1]))),
            r"feature 'f': id 7 is outside the rows \[0, 3\) of table 't'",
        ),
        (
            lambda: EmbeddingCollection(
                [
                    EmbeddingConfig(name=n, num_embeddings=3, embedding_dim=d, feature_names=["f"])
                    for n, d in (("t", 4), ("u", 8))
                ]
            ),
            "all tables of an EmbeddingCollection need one embedding_dim; there are {'t': 4, 'u': 8}",
        ),
    ],
)
def test_wrong_use_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
