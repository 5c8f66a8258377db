"""Quantized tables over several ranks give what they give on one, however they are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from rayrec.distributed import Shard, Span
from rayrec.distributed.plan.cuts import by_cols, by_grid, by_rows, whole
from rayrec.modules import EmbeddingConfig
from rayrec.torchrec.inference import shard_quant_model
from rayrec.torchrec.inference.quantize import quantize_inference_model, read_exported_tables
from rayrec.train import export_run, parse_config
from rayrec.train.setup.build import model as model_of
from tests.inference.runs import train
from tests.ranks import on_ranks
from tests.train import small

RANKS = 3
CUTS = {
    "whole": lambda name, rows, dim: whole(name, rows, dim, [1]),
    "rows": lambda name, rows, dim: by_rows(name, rows, dim, [2, 0, 1]),
    "columns": lambda name, rows, dim: by_cols(name, rows, dim, [0, 2]),
    "columns of one rank": lambda name, rows, dim: by_cols(name, rows, dim, [1, 1]),
    "grid": lambda name, rows, dim: by_grid(name, rows, dim, [[0, 1], [2]]),
}
FORMATS = ["fp32", "fp16", "int8", "int4"]


def pooled(weighted: bool) -> EmbeddingBagCollection:
    def table(name: str, rows: int, features: list[str], pooling: PoolingType, dim: int = 8) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling
        )

    tables = [
        table("a", 30, ["x", "y"], PoolingType.MEAN),
        table("b", 9, ["z"], PoolingType.MEAN, 12),
        table("c", 50, ["x"], PoolingType.SUM),
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted, seed=5)


def sequences() -> EmbeddingCollection:
    def table(name: str, rows: int, features: list[str]) -> EmbeddingConfig:
        return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features)

    tables = [table("a", 30, ["x", "y"]), table("b", 9, ["z"]), table("c", 50, ["x"])]
    return EmbeddingCollection(tables, need_indices=True, seed=5)


def plan_of(module: Any, cuts: dict[str, str]) -> dict[str, tuple[Shard, ...]]:
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    return {c.name: CUTS[cuts[c.name]](c.name, c.num_embeddings, c.embedding_dim) for c in configs}


def batch_of(size: int, seed: int, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    count = int(lengths.sum())
    weights = torch.rand(count, generator=generator) if weighted else None
    ids = torch.randint(9, (count,), generator=generator)
    return KeyedJaggedTensor(["z", "x", "y"], ids, weights, lengths=lengths, stride=size)


def on_rank(group: Any, kind: str, formats: dict[str, str], cuts: dict[str, str] | None) -> int:
    def module() -> Any:
        return quantize_inference_model(sequences() if kind == "sequences" else pooled(kind == "weighted"), formats)

    unsharded = module()
    exact = cuts is not None and (kind == "sequences" or not {"rows", "grid"} & set(cuts.values()))
    sharded = shard_quant_model(module(), group, None if cuts is None else plan_of(unsharded, cuts))
    for step, sizes in enumerate(([3, 5, 2], [0, 4, 1], [1, 0, 0])):
        batch = batch_of(sizes[group.rank()], 10 * step + group.rank(), kind == "weighted")
        found, expected = sharded(batch), unsharded(batch)
        assert list(found.keys()) == list(expected.keys())
        if kind != "sequences":
            atol = 0 if exact else 1e-6
            torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=atol)
            continue
        for name, jagged in expected.items():
            torch.testing.assert_close(found[name].values(), jagged.values(), rtol=0, atol=0)
            assert found[name].lengths().tolist() == jagged.lengths().tolist()
            assert found[name].weights().tolist() == jagged.weights().tolist()
    return sum(buffer.numel() for buffer in sharded.buffers())


TABLES = ("a", "b", "c")


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["sequences", "plain", "weighted"]),
    formats=st.fixed_dictionaries({name: st.sampled_from(FORMATS) for name in TABLES}),
    cuts=st.fixed_dictionaries({name: st.sampled_from(sorted(CUTS)) for name in TABLES}),
)
def test_any_cut_gives_what_the_unsharded_module_gives(
    kind: str, formats: dict[str, str], cuts: dict[str, str]
) -> None:
    on_ranks(RANKS, on_rank, kind, formats, cuts)


@pytest.mark.parametrize("kind", ["plain", "sequences"])
def test_without_a_plan_ranks_share_the_bytes(kind: str) -> None:
    held = on_ranks(RANKS, on_rank, kind, {"a": "int8", "b": "fp16", "c": "int8"}, None)
    assert max(held) < 0.6 * sum(held), "one table has more than half of the bytes, and must be cut"


def ask_for_what_is_not_there(group: Any, kind: str) -> str:
    module = quantize_inference_model(sequences() if kind == "sequences" else pooled(False))
    sharded = shard_quant_model(module, group, plan_of(module, {"a": "rows", "b": "whole", "c": "columns"}))
    ids = torch.tensor([1, 2, 30 if group.rank() == 1 else 3])
    batch = KeyedJaggedTensor(["z", "x", "y"], ids, lengths=torch.ones(3, dtype=torch.int64))
    try:
        sharded(batch)
    except ValueError as error:
        good = KeyedJaggedTensor(["z", "x", "y"], ids % 9, lengths=torch.ones(3, dtype=torch.int64))
        sharded(good)
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["plain", "sequences"])
def test_an_id_outside_its_table_is_an_error_on_every_rank_and_the_next_batch_is_scored(kind: str) -> None:
    said = on_ranks(RANKS, ask_for_what_is_not_there, kind)
    assert "feature 'y', example 0: id 30 is outside the rows [0, 30) of table 'a'" in said[1]
    assert said[0] == said[2] == "rank 1 of 3 has an invalid batch; see the error of this rank"


class Bags(nn.Module):
    """A collection inside a model."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values()


def score_exported(group: Any, folder: Path, raw: dict[str, Any]) -> tuple[bool, int]:
    """Whether a trained model with the export's tables over all ranks scores as on this one alone; bytes held here."""

    def bags() -> nn.Module:
        return read_exported_tables(Bags(model_of(parse_config(raw), "meta").embedding_bags), folder)

    plan = {"item": by_rows("item", 80, 8, [0, 1, 2])}
    plan |= {"user": by_cols("user", 40, 8, [1, 2]), "tag": whole("tag", small.TAGS, 8, [0])}
    alone, sharded = bags(), shard_quant_model(bags(), group, plan)
    generator = torch.Generator().manual_seed(group.rank())
    ids = torch.randint(small.TAGS, (18,), generator=generator)
    batch = KeyedJaggedTensor(["user", "item", "tags"], ids, lengths=torch.full((9,), 2))
    same = torch.allclose(sharded(batch), alone(batch), rtol=0, atol=1e-6)
    return same, sum(buffer.numel() for buffer in sharded.buffers())


def test_tables_of_an_export_are_read_by_each_rank_for_its_part_alone(tmp_path: Path) -> None:
    run = train(tmp_path)
    made = export_run(run, tmp_path / "model")
    size = sum(place.end - place.begin for place in made.index.places)
    said = on_ranks(RANKS, score_exported, made.folder, small.raw_config(tmp_path))
    assert all(same for same, _ in said)
    assert sum(held for _, held in said) <= size + 64 * 6 and max(held for _, held in said) < 0.7 * size


def test_a_plan_that_does_not_hold_each_table_once_is_named() -> None:
    module = quantize_inference_model(pooled(False), {"a": "int8", "b": "int4", "c": "int8"})
    good = plan_of(module, {"a": "whole", "b": "whole", "c": "whole"})
    good = {name: (Shard(table=name, rows=s.rows, cols=s.cols, rank=0),) for name, (s,) in good.items()}
    shard = good["b"][0]

    def refused(text: str, *shards: Shard) -> None:
        with pytest.raises(ValueError, match=text):
            shard_quant_model(
                quantize_inference_model(pooled(False), {"a": "int8", "b": "int4", "c": "int8"}),
                None,
                {**good, "b": shards},
            )

    def part(rows: tuple[int, int], cols: tuple[int, int], rank: int = 0) -> Shard:
        return Shard(table="b", rows=Span(*rows), cols=Span(*cols), rank=rank)

    refused("table 'b'.*do not cover")
    refused("table 'b'.*do not cover", part((0, 8), (0, 12)))
    refused("table 'b': ranks 0 and 0 both have rows", shard, shard)
    refused("table 'b': a shard is on rank 1, outside the world of 1 ranks", part((0, 9), (0, 12), rank=1))
    refused(r"table 'b' is 9 x 12, but a shard has rows \[0, 10\)", part((0, 10), (0, 12)))
    refused("cut it at even columns", part((0, 9), (0, 3)), part((0, 9), (3, 12)))
    with pytest.raises(ValueError, match="no quantized"):
        shard_quant_model(pooled(False), None)
