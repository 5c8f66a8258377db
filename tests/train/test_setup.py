"""What workers train, built from the config: sharding plan, memory, optimizers, groups, rows of an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.data import Vocabulary
from rayrec.data.mapping.vocabulary import vocabulary_checksum
from rayrec.distributed import EmbOptimType, ParameterSharding, Shard, ShardingPlan, Span
from rayrec.train import StorageError, TrainError, parse_config
from rayrec.train.setup import build
from rayrec.train.setup.groups import layout_of
from rayrec.train.setup.init_from import ALL, _same_rows, warm_start
from tests.train.small import config_of, raw_config


@pytest.mark.parametrize(
    ("wanted", "elastic", "found"), [("auto", False, 1), (3, False, 3), (4, True, 3), (2, True, 2)]
)
def test_groups_are_those_of_the_config_or_of_the_plan(wanted: Any, elastic: bool, found: int) -> None:
    workers: Any = [1, 6] if elastic else 6
    config = config_of(trainer__num_workers=workers, sharding={"replicas": wanted})
    assert layout_of(config, 6).replicas == found
    if wanted == "auto":
        for ranks, size in [(1, 1), (2, 2), (4, 6), (3, 3)]:
            assert layout_of(config, 6, on_ranks(ranks)).group_size == size
    if elastic and wanted == 4:
        assert [layout_of(config, world).replicas for world in (1, 2, 3, 4, 6)] == [1, 2, 3, 4, 3]


def on_ranks(count: int, dense: bool = False) -> ShardingPlan:
    """A table of 12 rows a rank, 8 wide, by rows; the plain way to say a plan."""
    shards = tuple(Shard(table="user", rows=Span(12 * r, 12 * r + 12), cols=Span(0, 8), rank=r) for r in range(count))
    kernel = "dense" if dense else "fused"
    one = ParameterSharding(sharding_type="row_wise", compute_kernel=kernel, shards=shards, device="cpu")
    return ShardingPlan({"bags": {"user": one}})


@pytest.mark.parametrize(
    ("dense", "sparse", "kernel", "data_type", "state", "dense_bytes"),
    [
        ("adam", "rowwise_adagrad", "fused", "fp32", 12 * 4, 4 * 5 * 4),
        ("sgd", "adagrad", "fused", "fp32", 12 * 8 * 4, 4 * 5 * 2),
        ("adagrad", "sgd", "fused", "fp32", 0, 4 * 5 * 3),
        ("adamw", "sgd", "dense", "fp32", 12 * 8 * 4 * 3, 4 * 5 * 4),
        ("sgd", "sgd", "dense", "fp16", 12 * 8 * 2, 4 * 5 * 2),
    ],
)
def test_bytes_of_a_plan_by_hand(
    dense: str, sparse: str, kernel: str, data_type: str, state: int, dense_bytes: int
) -> None:
    """Two ranks of three hold 12 of 24 rows of 8 numbers; the dense part has 5."""
    raw = raw_config(Path("/nowhere"))
    raw["tables"][0] |= {"rows": 24, "data_type": data_type}
    raw["optimizers"] = {"dense": {"kind": dense, "lr": 0.1}, "sparse": {"kind": sparse, "lr": 0.1}}
    found = build.plan_memory(on_ranks(2, kernel == "dense"), parse_config(raw), 3, 5)
    weights = 12 * 8 * (4 if data_type == "fp32" else 2)
    assert found == [
        {"rank": rank, "weights_bytes": w, "optimizer_bytes": s, "dense_bytes": dense_bytes}
        for rank, (w, s) in enumerate([(weights, state), (weights, state), (0, 0)])
    ]


def test_the_config_becomes_what_planner_and_sharders_take() -> None:
    given = {"pooling_factor": 3.0, "sharding_types": ["row_wise"], "cache_load_factor": 0.3, "min_partition": 4}
    config = config_of(sharding={"constraints": {"tag": given, "user": {}}})
    found = build.constraints(config)
    assert found.keys() == {"tag", "user"}
    tag, user = found["tag"], found["user"]
    assert tag.cache_params is not None and tag.cache_params.load_factor == 0.3
    assert (tag.pooling_factors, tag.sharding_types, tag.min_partition) == ([3.0], ["row_wise"], 4)
    assert (user.pooling_factors, user.cache_params, user.sharding_types) == (None, None, None)
    params = build.fused_params(config.optimizers.sparse)
    assert params["optimizer"] is EmbOptimType.EXACT_ROWWISE_ADAGRAD and params["learning_rate"] == 0.1
    for gradients, scale in [("fp32", 1.0), ("fp16", 64.0), ("bf16", 64.0)]:
        wire = {"vectors": "fp16", "gradients": gradients, "gradient_scale": 64.0}
        codec = build._codec(config_of(sharding={"wire": wire}))
        assert codec.backward_scale == scale
    assert [table.pooling.name for table in build.tables(config)] == ["SUM", "SUM", "MEAN"]
    as_given, *_ = build.tables(config_of(tables=[{**config.tables[0].model_dump(), "init": 1.5}, *config.tables[1:]]))
    ends = [(one.get_weight_init_min(), one.get_weight_init_max()) for one in (as_given, build.tables(config)[0])]
    by_rows = config.tables[0].rows ** -0.5
    assert ends == [(-1.5, 1.5), (pytest.approx(-by_rows), pytest.approx(by_rows))]
    kinds = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1}
    assert kinds == build.STATE_PER_ELEMENT and build.DENSE_OPTIMIZERS.keys() == kinds.keys()
    for kind, count in kinds.items():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = build.DENSE_OPTIMIZERS[kind]([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        assert sum(s.shape == (3,) for s in optimizer.state[parameter].values() if isinstance(s, torch.Tensor)) == count


def test_a_given_plan_is_checked_against_workers_and_tables(tmp_path: Path) -> None:
    def refused(text: str, world: int = 2, replicas: int = 1, rows: int = 24) -> None:
        raw = raw_config(Path("/nowhere"), sharding={"plan": str(tmp_path / "plan.json")})
        raw["tables"] = [{"name": "user", "rows": rows, "dim": 8, "features": ["user", "item", "tags"]}]
        config = parse_config(raw)
        if not text:
            assert build.given_plan(config, world, replicas) is not None
            return
        with pytest.raises(TrainError, match=text):
            build.given_plan(config, world, replicas)

    assert build.given_plan(config_of(), 1) is None
    refused("cannot be read: No such file")
    (tmp_path / "plan.json").write_text(on_ranks(2).to_json())
    refused("")
    refused("", world=3, replicas=2)
    refused(r"places shards on 2 ranks, but trainer\.num_workers is 1; raise it, .*--world 1`", world=1)
    refused(r"on 2 ranks, but each of 3 groups \(sharding\.replicas\) has 1 of the 3 workers", world=1, replicas=3)
    refused(r"table 'user' is \(25, 8\) \(rows, dim\) in the config, but .* has it as \(24, 8\)", rows=25)
    (tmp_path / "plan.json").write_text(on_ranks(1).to_json().replace('"user"', '"other"'))
    refused("does not have it; make a new plan with `rayrec plan`", world=0)


FACTS = {"mapping": "hash", "seed": 1}


WORDS = {"mapping": "vocabulary", "hash_law": 1, "oov_rows": 2, "vocabulary_size": 5, "vocabulary_checksum": "x"}


def test_rows_that_mean_other_ids_are_refused_for_a_warm_start() -> None:
    assert _same_rows("w", FACTS, FACTS, None) == ALL
    assert _same_rows("w", WORDS, WORDS, None) == ALL
    assert _same_rows("w", FACTS, {**FACTS, "id_type": "text"}, None) == ALL, "an earlier checkpoint has none"
    with pytest.raises(TrainError, match="id_type was integer and is text"):
        _same_rows("w", {**FACTS, "id_type": "integer"}, {**FACTS, "id_type": "text"}, None)
    with pytest.raises(
        TrainError, match="w: its ids would map to other rows: seed was 1 and is 2; use the mapping of that run"
    ):
        _same_rows("w", FACTS, {**FACTS, "seed": 2}, None)
    with pytest.raises(TrainError, match="mapping was hash and is vocabulary"):
        _same_rows("w", {"mapping": "hash"}, {"mapping": "vocabulary"}, None)


def test_new_ids_at_the_end_of_a_vocabulary_leave_the_first_rows_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("".join(f"id {i}\n" for i in range(5)))
    vocabulary = Vocabulary(path=str(path), oov_rows=2)
    words = {"mapping": "vocabulary", "hash_law": 1, "oov_rows": 2}
    before = {**words, "vocabulary_size": 3, "vocabulary_checksum": vocabulary_checksum(str(path), 3)}
    for size in (3, 5):
        assert _same_rows("w", before, {**before, "vocabulary_size": size, "vocabulary_checksum": "y"}, vocabulary) == 5
    fix = "; use the mapping of that run, or list the table in init_from.fresh"
    for now, text in [
        ({"oov_rows": 1}, f"w: oov_rows was 2 and is 1{fix}"),
        ({"hash_law": 2}, f"w: hash_law was 1 and is 2{fix}"),
        ({"vocabulary_size": 2}, f"w: the first 3 ids of {path} differ from the ids of that run; append new ids "
                                 f"to the end of the vocabulary{fix}"),
    ]:  # fmt: skip
        with pytest.raises(TrainError) as caught:
            _same_rows("w", before, {**before, **now}, vocabulary)
        assert str(caught.value) == text
    with pytest.raises(TrainError, match="w: the first 3 ids of"):
        _same_rows("w", {**before, "vocabulary_checksum": "other"}, {**before, "vocabulary_size": 5}, vocabulary)
    with pytest.raises(TrainError, match="its ids would map to other rows: mapping was hash and is vocabulary"):
        _same_rows("w", {"mapping": "hash"}, before, vocabulary)


def test_weights_to_begin_with_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("name: old")
    (tmp_path / "old" / "checkpoints").write_text("a file")
    config = parse_config(raw_config(tmp_path) | {"init_from": str(tmp_path / "old")})
    with pytest.raises(StorageError, match=rf"^init_from: {tmp_path}/old cannot be read: Not a directory$"):
        warm_start(config, {})
    assert warm_start(config_of(), {}) is None


def test_ids_of_a_feature_map_to_the_rows_of_the_smallest_table_that_reads_it() -> None:
    raw = raw_config(Path("/nowhere"))
    raw["tables"].append({"name": "user2", "rows": 30, "dim": 8, "features": ["user", "item"]})
    assert build.rows_of(parse_config(raw)) == {"user": 30, "item": 30, "tags": 7}
