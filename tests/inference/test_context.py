"""What all rows of a request share is looked up once: the scores are those of rows that have it each, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rayrec import Batch, EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from rayrec.inference import Inputs, Model, graph
from rayrec.inference.graph import Scoring, arguments, same_with_context
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.quant import TableFormat, place_tables
from rayrec.train import export_run
from tests.inference.runs import TwoTowers, train, trainer_scores

ROWS, KEYS = 30, ("user", "item", "tags", "seen")


class Mixed(nn.Module):
    """Pooled by sum and by mean, one table for two features, and a sequence."""

    def __init__(self, weighted: bool = False, looks: bool = False) -> None:
        super().__init__()
        sums = EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=8, feature_names=["user", "item"])
        means = EmbeddingBagConfig(
            name="b", num_embeddings=ROWS, embedding_dim=8, feature_names=["tags"], pooling=PoolingType.MEAN
        )
        seen = EmbeddingConfig(name="c", num_embeddings=ROWS, embedding_dim=8, feature_names=["seen"])
        self.bags = EmbeddingBagCollection(tables=[sums, means], is_weighted=weighted, device="meta")
        self.sequence = EmbeddingCollection(tables=[seen], device="meta")
        self.looks = looks
        self.over = nn.Linear(27, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, seen = self.bags(batch.sparse).values(), self.sequence(batch.sparse)["seen"]
        first = seen.to_padded_dense(1)[:, 0, :1]
        beside = batch.sparse["tags"].lengths()[:, None].float() if self.looks else first
        logits = self.over(torch.cat([batch.dense, pooled, beside], dim=1))[:, 0]
        return logits.sum(), logits


def scorings(model: Mixed, weighted: bool) -> tuple[Scoring, Scoring, torch.Tensor]:
    """With a context, without, and the tables' bytes."""
    configs = [c for collection in graph.collections_in(model).values() for c in graph.configs_of(collection)]
    places, size = place_tables(configs, {config.name: TableFormat.FP32 for config in configs})
    tables = torch.randn(size // 4, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    inputs = Inputs(KEYS, 2, None, weighted)
    made = []
    for given in (replace(inputs, context=graph.pooled_keys(model, KEYS)), inputs):
        copy = Mixed(weighted, model.looks)
        copy.over.load_state_dict(model.over.state_dict())
        slots = graph.replace_collections(copy, {place.table: place for place in places})
        made.append(Scoring(copy, slots, given, 0.0))
    return made[0], made[1], tables


@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_features_come_once_for_all_rows_and_sequences_do_not(weighted: bool) -> None:
    shared, plain, tables = scorings(Mixed(weighted), weighted)
    assert shared.inputs.context == ("user", "item", "tags")
    assert same_with_context(shared, plain, tables, dict.fromkeys(KEYS, ROWS))
    program = graph.to_graph(shared).module()
    drawn = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 3, (2 * 5,), generator=drawn)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=drawn)
    weights = torch.rand(len(ids), generator=drawn) if weighted else None
    rows = Batch(
        torch.randn(5, 2, generator=drawn),
        KeyedJaggedTensor(["item", "seen"], ids, weights, lengths=lengths),
        torch.zeros(5),
    )
    history = KeyedJaggedTensor(["user", "tags"], torch.arange(9) % ROWS, lengths=torch.tensor([0, 9]))
    args = arguments(rows, shared.inputs, tables, history)
    with torch.no_grad():
        assert torch.equal(program(*args), shared(*args))
    assert args[1].numel() == 9 + len(ids)  # not nine for every row


def test_a_model_that_looks_at_the_ids_itself_is_found_out() -> None:
    shared, plain, tables = scorings(Mixed(looks=True), False)
    assert not same_with_context(shared, plain, tables, dict.fromkeys(KEYS, ROWS))


def test_an_export_scores_a_context_as_if_every_row_had_it(tmp_path: Path) -> None:
    run = train(tmp_path / "run", TwoTowers, model={})
    model = Model(export_run(run, tmp_path / "out", factory=TwoTowers).folder)
    assert model.index.inputs.context == ("user", "item", "tags")
    batch, logits = trainer_scores(run, TwoTowers)[0]
    assert torch.equal(model.score(batch), logits)
    sparse, size = batch.sparse, batch.rows
    history = next(row for row in range(size) if int(sparse["tags"].lengths()[row]) > 1)
    first, last = sparse["tags"].offsets()[history : history + 2].tolist()
    bag = KeyedJaggedTensor(["tags"], sparse["tags"].values()[first:last], lengths=torch.tensor([last - first]))
    rest = sparse.permute([0, 1])
    repeated = KeyedJaggedTensor(["tags"], bag.values().repeat(size), lengths=bag.lengths().repeat(size))
    each = KeyedJaggedTensor.concat([rest, repeated])
    found = model.score(replace(batch, sparse=rest), bag)
    assert torch.equal(found, model.score(replace(batch, sparse=each)))
    assert not torch.equal(found, logits)
    with pytest.raises(ValueError, match="can share"):
        model.score(batch, KeyedJaggedTensor(["other"], torch.tensor([0]), lengths=torch.tensor([1])))
    outside = KeyedJaggedTensor(["tags"], torch.tensor([10**6]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="feature 'tags', example 0"):
        model.score(replace(batch, sparse=rest), outside)
