"""`Lookup` gives every feature of every table its vectors, under the names among all tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import DistributedModelParallel
from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.modules.lookup import Lookup
from rayrec.sparse import KeyedJaggedTensor

FEATURES = ["h", "i", "j"]
BATCH = KeyedJaggedTensor(FEATURES, torch.tensor([1, 2, 3, 4, 0, 5, 6, 8]), lengths=torch.tensor([2, 1, 0, 3, 1, 1]))

drawn_tables = st.lists(
    st.tuples(st.sampled_from([4, 8]), st.lists(st.sampled_from(FEATURES), min_size=1, unique=True), st.booleans()),
    min_size=1,
    max_size=4,
).map(
    lambda drawn: [
        EmbeddingBagConfig(
            name="ABCD"[number],
            num_embeddings=9,
            embedding_dim=width,
            feature_names=features,
            pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        )
        for number, (width, features, mean) in enumerate(drawn)
    ]
)


@settings(max_examples=60)
@given(tables=drawn_tables, by_id=st.sets(st.sampled_from(FEATURES)), sharded=st.booleans())
def test_every_feature_of_every_table_is_looked_up(
    tables: list[EmbeddingBagConfig], by_id: set[str], sharded: bool
) -> None:
    read = [(feature, table) for table in tables for feature in table.feature_names]
    by_id &= {feature for feature, _ in read}
    lookup = Lookup(tables, sorted(by_id), device="cpu", seed=1)
    weights = {name.split(".")[-2]: weight.detach().clone() for name, weight in lookup.named_parameters()}
    module = DistributedModelParallel(lookup, device=torch.device("cpu")) if sharded else lookup
    vectors = module(BATCH)
    assert {*vectors.pooled, *vectors.by_id} == set(lookup.widths) and len(lookup.widths) == len(read)
    for feature, table in read:
        name = feature if sum(other == feature for other, _ in read) == 1 else f"{feature}@{table.name}"
        rows = [weights[table.name][ids] for ids in BATCH[feature].to_dense()]
        if feature in by_id:
            assert torch.equal(vectors.by_id[name].values(), torch.cat(rows))
            assert vectors.by_id[name].lengths().tolist() == [len(each) for each in rows]
            continue
        sums = torch.stack(
            [each.sum(0) / (max(1, len(each)) if table.pooling is PoolingType.MEAN else 1) for each in rows]
        )
        torch.testing.assert_close(vectors.pooled[name], sums)
        assert lookup.widths[name] == table.embedding_dim


def test_a_sequence_that_no_table_reads_is_refused() -> None:
    table = EmbeddingBagConfig(name="A", num_embeddings=9, embedding_dim=4, feature_names=["h"])
    with pytest.raises(ValueError, match="no table reads 'x'"):
        Lookup([table], ["x"])
