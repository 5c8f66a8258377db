"""Saved under any plan and world size, loads under any other: weights, optimizer state, dense part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.torchrec.optim import PartialRowWiseAdam
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

T = ShardingType
KINDS = {"tw": T.TABLE_WISE, "rw": T.ROW_WISE, "cw": T.COLUMN_WISE, "dp": T.DATA_PARALLEL}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="a", num_embeddings=11, embedding_dim=16, feature_names=["f1", "f2"]),
        EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=16, feature_names=["f3"]),
    ]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def build(
    group: dist.ProcessGroup | None,
    kind: str,
    optimizer: EmbOptimType,
    seed: int,
    kernels: tuple[str, str] = ("fused", "fused"),
    make: Callable[[Any], torch.optim.Optimizer] = adam,
    tw_rank: int = 0,
) -> Any:
    world = group.size() if group else 1
    ranks = [tw_rank] if kind == "tw" else list(range(world))
    cuts = {t.name: cut(t, KINDS[kind], ranks, kernel) for t, kernel in zip(tables(), kernels, strict=True)}
    plan = ShardingPlan({"embedding_bags": cuts})
    torch.manual_seed(seed)
    model = DistributedModelParallel(
        DLRM(tables(), 2, dense_arch=[16], over_arch=[8, 1], seed=seed),
        env=ShardingEnv.from_process_group(group) if group else ShardingEnv.from_local(1, 0),
        device=DEVICE,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})],
    )
    return model, make(model.dense_parameters().values())


def batch_of(seed: int, world: int, rank: int) -> Batch:
    """This rank's even share of 8 examples."""
    generator = torch.Generator().manual_seed(seed)
    each = 8 // world
    parts = [
        Batch(
            torch.rand(1, 2, generator=generator),
            draw_kjt(generator, tables(), 1, 3),
            torch.randint(0, 2, (1,), generator=generator).float(),
        )
        for _ in range(8)
    ][rank * each : (rank + 1) * each]
    from tests.distributed.oracle import join

    return Batch(
        torch.cat([p.dense for p in parts]), join([p.sparse for p in parts]), torch.cat([p.label for p in parts])
    )


def train(model: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss, _ = model(batch_of(step, group.size() if group else 1, group.rank() if group else 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_run(group: dist.ProcessGroup, root: str, kind: str, optimizer: EmbOptimType, *how: Any) -> list[float]:
    model, dense = build(group, kind, optimizer, 1, *how)
    train(model, dense, group, range(3))
    CheckpointStore(root).save(3, model, dense, {"note": "hello"}, group)
    return train(model, dense, group, range(3, 6))


def load_run(group: dist.ProcessGroup, root: str, kind: str, optimizer: EmbOptimType, *how: Any) -> list[float]:
    model, dense = build(group, kind, optimizer, 2, *how)
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None and checkpoint.step == 3 and checkpoint.extra == {"note": "hello"}
    store.load(checkpoint, model, dense, group)
    return train(model, dense, group, range(3, 6))


def mean_losses(answers: list[list[float]]) -> torch.Tensor:
    return torch.tensor(answers).mean(0)


@pytest.mark.parametrize("saved, loaded", [("rw", "cw"), ("cw", "dp"), ("dp", "tw"), ("tw", "rw")])
@pytest.mark.parametrize("worlds", [(2, 4), (4, 2), (2, 1)])
def test_training_goes_on_under_another_plan_and_world(
    tmp_path: Path, saved: str, loaded: str, worlds: tuple[int, int]
) -> None:
    adagrad = EmbOptimType.EXACT_ADAGRAD
    before = mean_losses(on_ranks(worlds[0], save_run, str(tmp_path), saved, adagrad))
    after = mean_losses(on_ranks(worlds[1], load_run, str(tmp_path), loaded, adagrad))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM])
def test_state_of_other_optimizers_comes_along(tmp_path: Path, optimizer: EmbOptimType) -> None:
    before = mean_losses(on_ranks(2, save_run, str(tmp_path), "rw", optimizer))
    after = mean_losses(on_ranks(2, load_run, str(tmp_path), "dp", optimizer))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_the_count_of_updates_comes_along_from_a_rank_that_is_not_the_first(tmp_path: Path) -> None:
    """Adam corrects its bias by it; rank 0 has no table."""
    where = ("fused", "fused"), adam, 1
    before = mean_losses(on_ranks(2, save_run, str(tmp_path), "tw", EmbOptimType.ADAM, *where))
    after = mean_losses(on_ranks(2, load_run, str(tmp_path), "rw", EmbOptimType.ADAM))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": adam,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "row-wise adam": lambda params: PartialRowWiseAdam(params, lr=0.01),
}


@pytest.mark.parametrize("saved, loaded, worlds", [("rw", "tw", (2, 1)), ("dp", "rw", (1, 2)), ("tw", "dp", (2, 4))])
@pytest.mark.parametrize("name", list(DENSE))
def test_dense_tables_and_their_optimizer_go_on_under_another_plan(
    tmp_path: Path, saved: str, loaded: str, worlds: tuple[int, int], name: str
) -> None:
    how = (EmbOptimType.EXACT_ADAGRAD, ("dense", "dense"), DENSE[name])
    before = mean_losses(on_ranks(worlds[0], save_run, str(tmp_path), saved, *how))
    after = mean_losses(on_ranks(worlds[1], load_run, str(tmp_path), loaded, *how))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("saved, loaded, worlds", [("cw", "rw", (2, 4)), ("rw", "cw", (4, 2)), ("cw", "tw", (2, 1))])
def test_dense_and_fused_tables_go_on_side_by_side(
    tmp_path: Path, saved: str, loaded: str, worlds: tuple[int, int]
) -> None:
    how = (EmbOptimType.EXACT_ADAGRAD, ("fused", "dense"))
    before = mean_losses(on_ranks(worlds[0], save_run, str(tmp_path), saved, *how))
    after = mean_losses(on_ranks(worlds[1], load_run, str(tmp_path), loaded, *how))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_of_the_other_kind_of_training_is_refused_by_name(tmp_path: Path) -> None:
    adagrad, dense = EmbOptimType.EXACT_ADAGRAD, ("fused", "dense")
    store = CheckpointStore(tmp_path)
    fused_model, fused_optimizer = build(None, "tw", adagrad, 0)
    mixed_model, mixed_optimizer = build(None, "tw", adagrad, 0, dense)
    saved = store.save(1, fused_model, fused_optimizer)
    with pytest.raises(ValueError, match=r"table 'embedding_bags.embedding_bags.b' was trained inside backward"):
        store.load(saved, mixed_model, mixed_optimizer)
    store.load(saved, mixed_model)  # to look, not to train on
    saved = store.save(2, mixed_model, mixed_optimizer)
    with pytest.raises(ValueError, match=r"no optimizer state of table 'embedding_bags.embedding_bags.b/momentum1'"):
        store.load(saved, fused_model, fused_optimizer)


def test_a_state_that_no_other_cut_could_take_up_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = build(None, "tw", EmbOptimType.EXACT_SGD, 0, ("dense", "fused"), torch.optim.Adafactor)
    train(model, optimizer, None, range(1))
    with pytest.raises(ValueError, match=r"bags.a': the optimizer keeps a state 'col_var' of shape .* 11 x 16"):
        CheckpointStore(tmp_path).save(1, model, optimizer)


def row_state_round_trip(group: dist.ProcessGroup, root: str) -> dict[str, list[float]]:
    """Accumulators 1 and 3 of two equally wide column shards; read back whole, and cut as before."""
    store, rowwise = CheckpointStore(root), EmbOptimType.EXACT_ROWWISE_ADAGRAD
    model, dense = build(group, "cw", rowwise, seed=1)
    for table in model.tables().values():
        for item in table.local:
            item.state["momentum1"].fill_(1 if item.shard.cols.start == 0 else 3)
    store.save(1, model, dense, {}, group)
    found = {}
    for kind in ("tw", "cw"):
        model, dense = build(group, kind, rowwise, seed=2)
        store.load(store.latest(), model, dense, group)  # type: ignore[arg-type]
        values = [item.state["momentum1"] for table in model.tables().values() for item in table.local]
        found[kind] = sorted({value for state in values for value in state.tolist()})
    return found


def test_row_wise_state_is_averaged_where_columns_merge_and_kept_where_they_do_not(tmp_path: Path) -> None:
    first, second = on_ranks(2, row_state_round_trip, str(tmp_path))
    assert first == {"tw": [2.0], "cw": [1.0]}
    assert second == {"tw": [], "cw": [3.0]}


def test_only_folders_with_a_manifest_are_checkpoints(tmp_path: Path) -> None:
    model, dense = build(None, "tw", EmbOptimType.EXACT_SGD, 0)
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    paths = [Path(store.save(step, model, dense, {"step": step}).path) for step in (1, 2, 3)]
    (paths[2] / "manifest.json").unlink()
    os.utime(paths[2], (0, 0))  # younger ones may only look unfinished
    (paths[1] / "manifest.json").write_text("{half a mani")
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert [damaged.path for damaged in store.listing()[1]] == [str(paths[1])]
    last = store.save(4, model, dense)
    store.prune(1)
    assert [c.step for c in store.all()] == [4]
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["attempt.json", last.name]
    assert json.loads(Path(last.path, "manifest.json").read_text())["step"] == 4


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model, dense = build(None, "tw", EmbOptimType.EXACT_SGD, 0)
    store = CheckpointStore(tmp_path)
    saved = store.save(1, model, dense)
    other, _ = build(None, "tw", EmbOptimType.EXACT_ADAGRAD, 0)
    with pytest.raises(ValueError, match=r"no optimizer state of table 'embedding_bags.embedding_bags.a/momentum1'"):
        store.load(saved, other)
    wide = DistributedModelParallel(
        DLRM(tables(), 2, dense_arch=[16], over_arch=[4, 1]),
        env=ShardingEnv.from_local(1, 0),
        device=DEVICE,
        plan=model.plan,
    )
    with pytest.raises(ValueError, match=r"parameter 'over_arch.*shape .* in the checkpoint"):
        store.load(saved, wide)


def test_a_root_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, dense = build(None, "tw", EmbOptimType.EXACT_SGD, 0)
    with pytest.raises(OSError, match="file"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, model, dense)
