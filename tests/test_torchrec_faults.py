"""Faults that TorchRec had and mended in 2026, each by the number of its change: none of them is here.

`COVERED` names the tests elsewhere that would fail; the tests below are for the rest. What cannot occur here, and why:

- 2D sync, checkpoint and copy of stashed tensors (4430, 4218, 4322): tables and optimizer state are never stashed.
- Cache cost of injected key-value options (4382): there are no key-value tables; a cache's cost is planned with it.
- Deadlock of fully sharded 2D in inference (3849): models are served whole or with sharded tables on CPUs, never in 2D.
- Per-task loop that reshaped required inputs twice (4109): labels are measured in one tensor, without such a loop.
- Unbounded join of a metric thread at exit (4392): figures are made in the step's own thread.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rayrec.distributed import EmbeddingBagCollectionSharder
from rayrec.metrics import LabelMetrics
from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from rayrec.torchrec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from rayrec.torchrec.distributed.train_pipeline import DataLoadingThread
from rayrec.torchrec.metrics.metrics_config import BatchSizeStage
from rayrec.torchrec.metrics.throughput import ThroughputMetric
from rayrec.torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from rayrec.train.worker.learner import make_learner
from rayrec.train.worker.session import session_alone
from tests.train.small import Silent, make_job, raw_config, write_all
from tests.train.test_loop import batches

ROOT = Path(__file__).resolve().parent
COVERED = {
    4424: "torchrec/test_rec_metrics.py::test_a_window_keeps_the_last_batch_even_where_it_is_larger",
    4461: "metrics/test_binary.py::test_same_on_the_gpu",
    4497: "distributed/test_train_pipeline.py::test_copies_to_a_gpu_run_ahead",
    4602: "distributed/test_dedup.py::test_gradients_of_the_weights_are_those_of_one_process_and_never_travel",
    4121: "train/test_loop.py::test_a_step_in_parts_is_the_step_on_the_whole_batch",
    4159: "distributed/test_variable_batch.py::test_training_equals_that_on_the_expanded_batch",
    3652: "distributed/test_wrong_use.py::test_plans_that_do_not_fit_are_refused_by_name",
    3997: "planner/test_planner.py::test_tables_cut_by_columns_in_a_host_share_the_hosts_also_where_each_fills_one",
    4000: "planner/test_topology.py::test_a_last_host_may_be_shorter",
}


@pytest.mark.parametrize("change", COVERED)
def test_a_fault_is_covered_by_a_test_that_is_there(change: int) -> None:
    path, _, name = COVERED[change].partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_ids_of_features_of_unequal_length_stay_with_their_feature() -> None:
    """4525: managed collisions of two features on one table."""
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=50, feature_names=["f", "g"])
    rows = MCHManagedCollisionModule(50, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1)
    collection = ManagedCollisionCollection({"t": rows}, [config])
    ids = {"f": [1001, 1002], "g": [1003, 1001, 1004, 1005, 1002]}
    lengths = torch.tensor([2, 0, 0, 1, 3, 1])
    kjt = KeyedJaggedTensor(["f", "g"], torch.tensor([*ids["f"], *ids["g"]]), lengths=lengths)
    for _ in range(3):
        found = collection(kjt)
    assert torch.equal(found.lengths(), lengths)
    row_of: dict[int, int] = {}
    for name, raw in ids.items():
        given = found[name].values().tolist()
        assert len(given) == len(raw)
        for one, row in zip(raw, given, strict=True):
            assert row_of.setdefault(one, row) == row
    assert len(set(row_of.values())) == len(row_of)


def test_the_gradient_norm_that_is_told_is_that_before_clipping(tmp_path: Path) -> None:
    """4421: the norm was read after, or while, gradients were clipped."""
    write_all(tmp_path, rows=64)
    norms = []
    for bound in (None, 1e-6):
        job = make_job(raw_config(tmp_path, optimizers__dense={"kind": "sgd", "lr": 1e-9, "max_gradient_norm": bound}))
        learner = make_learner(job, session_alone(Silent()))
        learner.step(batches([9], 1)[0], 1.0)
        norms.append(learner.gradient_norm())
    assert norms[0] is not None and norms[0] > 1e-3
    assert norms[1] == pytest.approx(norms[0])


def test_no_plan_under_an_absolute_reservation_is_told() -> None:
    """4595: the message itself failed."""
    tables = [EmbeddingBagConfig(name="big", embedding_dim=64, num_embeddings=10_000_000, feature_names=["f"])]
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables, device="meta")})
    planner = EmbeddingShardingPlanner(
        topology=Topology(2, "cpu", ddr_cap=1 << 30),
        storage_reservation=FixedAbsoluteStorageReservation(256 << 20),
    )
    with pytest.raises(ValueError, match=r"big.*What would fit"):
        planner.plan(model, [EmbeddingBagCollectionSharder()])


def test_a_loading_thread_hands_on_what_it_died_of() -> None:
    """4294: the trainer waited for ever."""

    def source() -> Any:
        yield torch.zeros(1)
        raise OSError("the store is gone")

    thread = DataLoadingThread(torch.device("cpu"), source(), False)
    thread.start()
    assert torch.equal(thread.get_next_batch(), torch.zeros(1))
    with pytest.raises(OSError, match="the store is gone"):
        thread.get_next_batch()
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["binary", "number"])
def test_a_snapshot_of_metrics_shares_nothing_with_what_goes_on(kind: str) -> None:
    """3974."""
    metrics = LabelMetrics([kind])
    metrics.update(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0]))
    state, wanted = metrics.state(), metrics.compute()
    metrics.update(torch.tensor([3.0]), torch.tensor([0.0]))
    other = LabelMetrics([kind])
    other.load_state(state)
    other.update(torch.tensor([]), torch.tensor([]))
    assert other.compute() == wanted
    metrics.reset()
    assert other.compute() == wanted and not math.isnan(wanted["mse"])


def test_throughput_loads_into_one_with_other_batch_sizes() -> None:
    """3854: a state without stages did not load into a metric with them."""
    plain = ThroughputMetric(batch_size=4, world_size=1, window_seconds=5, warmup_steps=1)
    plain.update()
    stages = [BatchSizeStage(2, 3), BatchSizeStage(8, None)]
    staged = ThroughputMetric(batch_size=1, world_size=1, window_seconds=5, warmup_steps=1, batch_size_stages=stages)
    for given, taken in ((plain, staged), (staged, plain)):
        before = int(given.total_examples)
        taken.load_state_dict(given.state_dict())
        assert int(taken.total_examples) == before
