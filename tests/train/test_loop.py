"""The loop on several ranks, without Ray: every plan and number of ranks trains the same, also on unequal rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.checkpoint import CheckpointStore
from rayrec.data import empty_batch
from rayrec.distributed.comm import count_bytes, count_collectives
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import TrainError, parse_config
from rayrec.train.worker.lockstep import RankError, in_step
from rayrec.train.worker.micro_batches import micro_batch_of
from tests.ranks import PerRank, on_ranks
from tests.train.small import (
    ITEMS,
    TAGS,
    USERS,
    Silent,
    fit_job,
    fit_on_rank,
    learner_of,
    make_job,
    rank_session,
    raw_config,
    table,
    write_all,
)

PLANS: dict[str, dict[str, Any]] = {
    "row_wise": {name: {"sharding_types": ["row_wise"]} for name in ("user", "item", "tag")},
    "column_wise": {name: {"sharding_types": ["column_wise"], "min_partition": 4} for name in ("user", "item", "tag")},
    "table_wise": {name: {"sharding_types": ["table_wise"]} for name in ("user", "item", "tag")},
    "data_parallel": {name: {"sharding_types": ["data_parallel"]} for name in ("user", "item", "tag")},
    "mixed": {
        "user": {"sharding_types": ["row_wise"]},
        "item": {"sharding_types": ["column_wise"], "min_partition": 4},
        "tag": {"sharding_types": ["data_parallel"]},
    },
    "dense": {
        "user": {"sharding_types": ["row_wise"], "compute_kernels": ["dense"]},
        "item": {"sharding_types": ["table_wise"], "compute_kernels": ["dense"]},
        "tag": {"sharding_types": ["data_parallel"], "compute_kernels": ["dense"]},
    },
}
LABELS = [{"name": "click", "column": "label"}, {"name": "like", "weight": 0.3, "on_null": "ignore"}]
# What a step of the model costs: ids and vectors there and back, and one exchange for all replicated tables.
COLLECTIVES = {"all_to_all": 4, "all_gather": 1}


def batches(sizes: list[int], seed: int, weighted: bool = False) -> list[Batch]:
    """One batch a rank, of these sizes; empty bags among them, and weights of 0."""
    made = []
    for number, rows in enumerate(sizes):
        random = torch.Generator().manual_seed(seed * 100 + number)
        lengths = [torch.ones(rows), torch.ones(rows), torch.randint(0, 4, (rows,), generator=random)]
        counts = torch.cat(lengths).long()
        ids = [
            torch.randint(0, limit, (int(length.sum()),), generator=random)
            for limit, length in zip((USERS, ITEMS, TAGS), lengths, strict=True)
        ]
        kjt = KeyedJaggedTensor(["user", "item", "tags"], torch.cat(ids), lengths=counts)
        label = torch.randint(0, 2, (rows,), generator=random).float()
        dense = torch.randn(rows, 1, generator=random)
        weight = torch.randint(0, 4, (rows,), generator=random) * torch.rand(rows, generator=random)
        made.append(Batch(dense, kjt, label, weight if weighted else None))
    return made


def with_likes(batch: Batch, seed: int) -> Batch:
    """A second label, which some rows do not have."""
    random = torch.Generator().manual_seed(seed)
    like = torch.randint(0, 2, (batch.rows,), generator=random).float()
    like[torch.rand(batch.rows, generator=random) < 0.3] = torch.nan
    return replace(batch, label=torch.stack([batch.label, like], dim=1))


def joined(parts: list[Batch]) -> Batch:
    """The batches of all ranks as one."""
    keys = ["user", "item", "tags"]
    lengths = torch.cat([part.sparse[key].lengths() for key in keys for part in parts])
    ids = torch.cat([part.sparse[key].values() for key in keys for part in parts])
    dense, label = torch.cat([part.dense for part in parts]), torch.cat([part.label for part in parts])
    weights = [part.weight for part in parts if part.weight is not None]
    weight = torch.cat(weights) if weights else None
    return Batch(dense, KeyedJaggedTensor(keys, ids, lengths=lengths), label, weight)


class Steps:
    """A stream of the given batches."""

    start_cursor = None

    def __init__(self, steps: list[Batch]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[tuple[Batch, None]]:
        return ((step, None) for step in self.steps)


def parameters(learner: Any) -> dict[str, torch.Tensor]:
    dense = {name: p.detach().clone() for name, p in learner.model.other_parameters().items()}
    return dense


def scores(learner: Any, probe: Batch) -> torch.Tensor:
    """Logits of a probe batch: they show every parameter, sharded or not."""
    learner.model.eval()
    return learner.score(probe)


def in_turn(steps: list[Batch], raw: dict[str, Any], control: Any) -> Iterator[Any]:
    """The batches of a rank, step by step with the other ranks."""
    return in_step(Steps(steps), empty_batch(parse_config(raw).data_schema), control)


def trained(
    group: dist.ProcessGroup, raw: dict[str, Any], steps: list[Batch], probe: Batch
) -> tuple[dict[str, torch.Tensor], torch.Tensor, Counter[str]]:
    session = rank_session(group)
    learner = learner_of(make_job(raw), session)
    for turn in in_turn(steps, raw, session.control):
        with count_collectives() as counted:
            learner.step(turn.batch, turn.share)
    return parameters(learner), scores(learner, probe), counted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize(
    ("plan", "weighted", "several"),
    [*((plan, False, False) for plan in PLANS), ("row_wise", True, False), ("mixed", True, True)],
)
def test_unequal_ranks_train_as_one_process_on_all_rows(folder: Path, plan: str, weighted: bool, several: bool) -> None:
    """Also with a rank that has no rows at all, and with rows of unlike weights: ranks then differ in their weight as
    well; also for several labels; and a step costs no more collectives whatever the plan.
    """
    # Row-wise Adagrad keeps one number a row and shard, so columns that are cut apart train a little differently.
    kind = "adagrad" if plan in ("column_wise", "mixed") else "rowwise_adagrad"
    raw = raw_config(folder, sharding={"constraints": PLANS[plan]}, optimizers__sparse={"kind": kind, "lr": 0.1})
    sizes = [[5, 3], [8, 0], [0, 2], [1, 9], [4, 4]]
    steps = [batches(size, seed, weighted) for seed, size in enumerate(sizes)]
    if weighted:
        steps.append([batches([3], 7, True)[0], replace(batches([4], 8)[0], weight=torch.zeros(4))])
    if weighted:
        raw["schema"]["sample_weight"] = {}
    if several:
        raw["schema"]["label"], raw["schema"]["labels"] = None, LABELS
        raw["model"] = {"name": "deepfm", "args": {"deep_arch": [16, 2]}}
        steps = [[with_likes(part, rank) for rank, part in enumerate(step)] for step in steps]
    (probe,) = batches([30], 99)
    probe = with_likes(probe, 99) if several else probe
    session = rank_session()
    alone = learner_of(make_job(raw), session)
    for parts in steps:
        alone.step(joined(parts), share=1.0)
    per_rank = PerRank([[step[rank] for step in steps] for rank in range(2)])
    for dense, logits, counted in on_ranks(2, trained, raw, per_rank, probe):
        for name, expected in parameters(alone).items():
            torch.testing.assert_close(dense[name], expected, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(logits, scores(alone, probe), atol=2e-5, rtol=1e-4)
        assert all(times <= COLLECTIVES[name] for name, times in counted.items()), counted


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_row_is_used_by_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    write_all(tmp_path, rows=601)
    raw = raw_config(tmp_path)
    raw["schema"] |= {"group": {"column": "city"}, "timestamp": {"column": "at"}}
    outcomes = on_ranks(world_size, fit_on_rank, raw)
    for outcome in outcomes:
        assert (outcome["train"]["samples"], outcome["epochs"]) == (2 * 601, 2)
        assert outcome["eval"] == outcomes[0]["eval"]
        assert outcome["eval"]["samples"] == 301
        assert 10 <= outcome["steps"] / 2 <= 12
    assert outcomes[0]["eval"]["auc"] > 0.6
    assert 0.5 < outcomes[0]["eval"]["gauc"] < 1 and outcomes[0]["eval"]["groups"] == 9
    assert sum(band["weight"] for band in outcomes[0]["eval"]["reliability"]) == 301
    assert sum(stretch["samples"] for stretch in outcomes[0]["eval"]["by_time"]) == 301


def test_more_ranks_than_rows_in_a_batch_and_in_the_data(tmp_path: Path) -> None:
    write_all(tmp_path, rows=2)
    outcomes = on_ranks(3, fit_on_rank, raw_config(tmp_path, trainer__batch_size=3, trainer__epochs=1))
    assert [outcome["train"]["samples"] for outcome in outcomes] == [2, 2, 2]
    assert outcomes[0]["eval"]["samples"] == 301


def by_country(folder: Path, rows: int) -> int:
    """Puts a column `country` into the training files, and the files below `day=…`; rows of France on day 1."""
    found = 0
    for day, file in enumerate(sorted((folder / "train").glob("*.parquet"))):
        below = folder / "train" / f"day={day}"
        below.mkdir()
        data = pq.read_table(file)
        data = data.append_column("country", pa.array(["de" if row % 3 else "fr" for row in data["row"].to_pylist()]))
        pq.write_table(data, below / "x.parquet", row_group_size=40)
        file.unlink()
        found += 0 if day == 1 else sum(row % 3 == 0 for row in data["row"].to_pylist())
    assert 0 < found < rows
    return found


def test_filters_choose_the_rows_of_every_rank_also_on_resume(tmp_path: Path) -> None:
    passing = by_country(write_all(tmp_path, rows=601), 601)
    train = {"path": str(tmp_path / "train"), "filters": [["day", "!=", 1], ["country", "=", "fr"]]}
    changes = {"data__train": train, "trainer__batch_size": 24}
    first = on_ranks(3, fit_on_rank, raw_config(tmp_path, **changes, trainer__epochs=1))[0]
    second = on_ranks(2, fit_on_rank, raw_config(tmp_path, **changes, trainer__epochs=2))
    assert first["train"]["samples"] == passing
    assert [outcome["train"]["samples"] for outcome in second] == [2 * passing] * 2


def test_filters_that_no_row_passes_end_the_run_on_every_rank(tmp_path: Path) -> None:
    by_country(write_all(tmp_path, rows=100), 100)
    train = {"path": str(tmp_path / "train"), "filters": [["country", "=", "es"]]}
    for message in on_ranks(2, failing_rank, raw_config(tmp_path, data__train=train)):
        assert "No training rows: all 100 rows of" in message and "country = 'es'" in message


def failing_rank(group: dist.ProcessGroup, raw: dict[str, Any]) -> str:
    with pytest.raises(TrainError) as caught:
        fit_on_rank(group, raw)
    return str(caught.value)


def test_a_run_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    """3 ranks train one epoch, 2 go on, and each row is used once an epoch."""
    write_all(tmp_path, rows=500)
    first = on_ranks(3, fit_on_rank, raw_config(tmp_path, trainer__epochs=1))[0]
    second = on_ranks(2, fit_on_rank, raw_config(tmp_path, trainer__epochs=2))[0]
    assert (first["train"]["samples"], second["train"]["samples"]) == (500, 1000)
    latest = CheckpointStore(tmp_path / "runs" / "small" / "checkpoints").latest()
    assert latest is not None
    assert latest.extra["position"]["samples"] == 1000
    assert json.dumps(latest.extra)
    again = on_ranks(2, fit_on_rank, raw_config(tmp_path, trainer__epochs=2))[0]
    assert again["eval"] == second["eval"]


def told_progress(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[tuple[int, int]]:
    """(step, steps of the whole run) as told after every step."""
    sink = Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayrec.train.worker.reporter.PROGRESS_EVERY_S", 0.0)
        fit_job(make_job(raw), group, sink)
    return [(told["step"], told["total_steps"]) for told in sink.records if told["kind"] == "progress"]


def test_the_number_of_steps_is_known_from_the_first_one_on(tmp_path: Path) -> None:
    raw = raw_config(write_all(tmp_path, rows=200), trainer__epochs=3)
    assert on_ranks(1, told_progress, raw) == [[(step, 3 * 4) for step in range(1, 13)]]


def bad_rank(group: dist.ProcessGroup, raw: dict[str, Any]) -> tuple[str, bool]:
    with pytest.raises(RankError) as caught:
        fit_on_rank(group, raw)
    return str(caught.value), caught.value.retry


def test_a_bad_row_is_told_on_every_rank_and_not_worth_another_attempt(tmp_path: Path) -> None:
    write_all(tmp_path)
    rows = table(100)
    bad = rows.set_column(rows.column_names.index("user"), "user", pa.array([*range(USERS), *[USERS] * 60]))
    pq.write_table(bad, tmp_path / "train" / "bad.parquet")
    (message, retry), other = on_ranks(2, bad_rank, raw_config(tmp_path))
    assert other == (message, retry) and not retry
    for part in ("user", "bad.parquet", "outside its table's rows [0, 40)", "value 40"):
        assert part in message


def replicas(group: dist.ProcessGroup, raw: dict[str, Any], steps: list[Batch], probe: Batch) -> Any:
    return (*trained(group, raw, steps, probe)[:2],)


@pytest.mark.parametrize("plan", ["row_wise", "mixed", "dense"])
def test_a_step_in_parts_is_the_step_on_the_whole_batch(folder: Path, plan: str) -> None:
    """For tables too, with a ragged tail, a rank without rows, and replicas that are equal to the bit."""
    raw = raw_config(folder, sharding={"constraints": PLANS[plan]}, optimizers__sparse={"kind": "adagrad", "lr": 0.1})
    steps = [batches(size, seed, weighted=True) for seed, size in enumerate([[7, 8], [2, 5], [0, 3], [1, 9]])]
    probe = batches([9], 77)[0]
    dealt_out = PerRank([[step[rank] for step in steps] for rank in range(2)])
    whole = on_ranks(2, replicas, raw, dealt_out, probe)
    raw["trainer"]["micro_batches"] = 3
    parts = on_ranks(2, replicas, raw, dealt_out, probe)
    for (dense, logits), (other_dense, other_logits) in zip(parts, whole, strict=True):
        torch.testing.assert_close(logits, other_logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(dense, other_dense, atol=1e-5, rtol=1e-5)
    for name, value in parts[0][0].items():
        assert torch.equal(value, parts[1][0][name]), name


def measured(group: dist.ProcessGroup, raw: dict[str, Any], steps: list[Batch], probe: Batch) -> Any:
    with count_bytes() as sent:
        dense, logits, _ = trained(group, raw, steps, probe)
    return dense, logits, sent["all_to_all"]


def test_vectors_travel_in_the_formats_of_the_config(folder: Path) -> None:
    """`sharding.wire`: fewer bytes, about the same model."""
    raw = raw_config(folder, sharding={"constraints": PLANS["row_wise"]})
    steps = [batches([32, 32], seed) for seed in range(4)]
    probe = batches([9], 77)[0]
    dealt_out = PerRank([[step[rank] for step in steps] for rank in range(2)])
    whole = on_ranks(2, measured, raw, dealt_out, probe)
    raw["sharding"]["wire"] = {"vectors": "int8", "gradients": "fp16", "gradient_scale": 1024}
    less = on_ranks(2, measured, raw, dealt_out, probe)
    for (dense, logits, sent), (other_dense, other_logits, other_sent) in zip(less, whole, strict=True):
        assert sent < 0.75 * other_sent and not torch.equal(logits, other_logits)
        torch.testing.assert_close(logits, other_logits, atol=0.05, rtol=0.05)
        torch.testing.assert_close(dense, other_dense, atol=0.05, rtol=0.05)


class Hashed(torch.nn.Module):
    """A model that looks up other ids than those of the batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.inner = DLRM(**arguments)

    def forward(self, batch: Batch) -> Any:
        sparse = batch.sparse
        ids = KeyedJaggedTensor(sparse.keys(), torch.zeros_like(sparse.values()), lengths=sparse.lengths())
        return self.inner(replace(batch, sparse=ids))


def test_a_model_that_cannot_be_worked_through_in_parts_is_told_so(folder: Path) -> None:
    raw = raw_config(folder, trainer__micro_batches=2)
    learner = learner_of(replace(make_job(raw), factory=Hashed))
    with pytest.raises(TrainError, match=r"micro_batches: the model must pass batch\.sparse unchanged"):
        learner.step(batches([8], 1)[0], 1.0)


class Sequences(torch.nn.Module):
    """A model with an `EmbeddingCollection`: the mean of its vectors, weighed by a dense layer."""

    def __init__(self, tables: Any, num_dense: int, device: Any = None, **_: Any) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=list(t.feature_names),
            )
            for t in tables
        ]
        self.sequences = EmbeddingCollection(configs, device=torch.device("meta"))
        self.out = torch.nn.Linear(24 + num_dense, 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.sequences(batch.sparse)
        means = [torch.segment_reduce(v.values(), "sum", lengths=v.lengths()) for v in vectors.values()]
        logits = self.out(torch.cat([*means, batch.dense], dim=1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, logits


def trained_sequences(group: dist.ProcessGroup | None, raw: dict[str, Any], steps: list[Batch], probe: Batch) -> Any:
    session = rank_session(group)
    learner = learner_of(replace(make_job(raw), factory=Sequences), session)
    for turn in in_turn(steps, raw, session.control):
        learner.step(turn.batch, turn.share)
    return scores(learner, probe), set(learner.decision.plan.plan)


def test_embedding_collections_are_sharded_by_the_trainer_too(folder: Path) -> None:
    raw = raw_config(folder, optimizers__sparse={"kind": "adam", "lr": 0.01})
    steps = [batches([5, 3], seed) for seed in range(4)]
    probe = batches([9], 77)[0]
    alone, _ = trained_sequences(None, raw, [joined(step) for step in steps], probe)
    dealt_out = PerRank([[step[rank] for step in steps] for rank in range(2)])
    for parts in (1, 2):
        raw["trainer"]["micro_batches"] = parts
        for logits, modules in on_ranks(2, trained_sequences, raw, dealt_out, probe):
            assert modules == {"sequences"}
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


def of_rows(rows: int, weighted: bool = False) -> Batch:
    """Two features with up to three ids a row, drawn alike for alike arguments."""
    draw = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 4, (2 * rows,), generator=draw)
    values = torch.arange(int(lengths.sum()))
    sparse = KeyedJaggedTensor(["f", "g"], values, values / 7.0 if weighted else None, lengths=lengths, stride=rows)
    weight = torch.rand(rows, generator=draw) if weighted else None
    return Batch(torch.rand(rows, 3, generator=draw), sparse, torch.arange(rows).float(), weight)


@settings(max_examples=20)
@given(st.integers(0, 9), st.data(), st.booleans())
def test_a_part_of_a_batch_has_its_rows(rows: int, data: st.DataObject, weighted: bool) -> None:
    whole = of_rows(rows, weighted)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    part = micro_batch_of(whole, start, stop)
    assert part.rows == stop - start and part.sparse.stride() == stop - start
    assert torch.equal(part.dense, whole.dense[start:stop]) and torch.equal(part.label, whole.label[start:stop])
    assert part.sparse.keys() == ["f", "g"]
    for key in ("f", "g"):
        told, all_of = part.sparse[key].to_dense(), whole.sparse[key].to_dense()
        assert [row.tolist() for row in told] == [row.tolist() for row in all_of[start:stop]]
    if weighted:
        assert part.weight is not None and torch.equal(part.weight, whole.weight[start:stop])  # type: ignore[index]
        assert torch.equal(part.sparse.weights(), part.sparse.values() / 7.0)
    else:
        assert part.weight is None and part.sparse.weights_or_none() is None
