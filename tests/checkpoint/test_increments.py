"""Increments: a full checkpoint and a chain of increments load as a full one of the same step, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore, DamagedCheckpointError, RemovedCheckpointError, Saving, Started
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
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
from tests.checkpoint.test_store import adam
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

T = ShardingType
TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=9001, embedding_dim=12, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="b", num_embeddings=503, embedding_dim=12, feature_names=["f3"]),
]
OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
)
PLANS = ("tw", "rw", "cw", "dp", "grid", "mixed", "dense")
CASES = [(plan, OPTIMIZERS[number % len(OPTIMIZERS)]) for number, plan in enumerate(PLANS)]
CASES += [("cw", optimizer) for optimizer in OPTIMIZERS[3:]]


def plan_of(name: str, world: int) -> ShardingPlan:
    ranks, last = list(range(world)), [world - 1]
    hosts = [ranks[: world // 2], ranks[world // 2 :]] if world > 1 and world % 2 == 0 else [ranks]
    kinds: dict[str, tuple[tuple[Any, Any, str], tuple[Any, Any, str]]] = {
        "tw": ((T.TABLE_WISE, last, "fused"), (T.TABLE_WISE, [0], "fused")),
        "rw": ((T.ROW_WISE, ranks, "fused"), (T.ROW_WISE, ranks, "fused")),
        "cw": ((T.COLUMN_WISE, ranks[:3], "fused"), (T.COLUMN_WISE, ranks[:3][::-1], "fused")),
        "dp": ((T.DATA_PARALLEL, ranks, "fused"), (T.DATA_PARALLEL, ranks, "fused")),
        "grid": ((T.GRID_SHARD, hosts, "fused"), (T.GRID_SHARD, hosts, "fused")),
        "mixed": ((T.COLUMN_WISE, ranks[:3], "fused"), (T.DATA_PARALLEL, ranks, "fused")),
        "dense": ((T.ROW_WISE, ranks, "fused"), (T.ROW_WISE, ranks, "dense")),
    }
    return ShardingPlan({"embedding_bags": {t.name: cut(t, *how) for t, how in zip(TABLES, kinds[name], strict=True)}})


def build(group: dist.ProcessGroup | None, plan: str, optimizer: EmbOptimType, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = DistributedModelParallel(
        DLRM(TABLES, 2, dense_arch=[12], over_arch=[4, 1], seed=seed),
        env=ShardingEnv.from_process_group(group) if group else ShardingEnv.from_local(1, 0),
        device=DEVICE,
        plan=plan_of(plan, group.size() if group else 1),
        sharders=[EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})],
    )
    return model, adam(model.dense_parameters().values())


def train(model: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None, steps: range) -> None:
    rank = group.rank() if group else 0
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        sparse = draw_kjt(generator, TABLES, 4, 3)
        label = torch.randint(0, 2, (4,), generator=generator).float()
        loss, _ = model(Batch(torch.rand(4, 2, generator=generator), sparse, label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all that a checkpoint holds of this rank: tables, their optimizer state, the dense part, the counts."""
    found = [torch.get_rng_state(), torch.tensor([kernel.iteration for kernel in model.kernels()])]
    for table in model.tables().values():
        for item in table.local:
            found += [item.weight, *item.state.values()]
    for parameter in model.dense_parameters().values():
        found += [parameter.detach(), *(v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))]
    return [tensor.clone() for tensor in found]


def save_chain(group: dist.ProcessGroup | None, root: str, plan: str, optimizer: EmbOptimType) -> None:
    """Steps 3 (full), 5, 6 and 7 (increments) in `root`, and a full checkpoint of step 7 in `root`-full."""
    model, dense = build(group, plan, optimizer)
    store = CheckpointStore(root)
    store.track_changes(model)
    assert store.save_increment(0, model, dense, Saving(), group) is Started.FULL_IS_DUE
    train(model, dense, group, range(3))
    store.save(3, model, dense, {"at": 3}, group)
    for first, last in ((3, 5), (5, 6), (6, 7)):
        train(model, dense, group, range(first, last))
        started = store.save_increment(last, model, dense, Saving(extra={"at": last}), group, background=last < 7)
        assert started is Started.STARTED, started
        store.finish(group)
    assert not [outcome.error for outcome in store.ended() if outcome.error]
    CheckpointStore(f"{root}-full").save(7, model, dense, {"at": 7}, group)


def load_both(
    group: dist.ProcessGroup | None, root: str, plan: str, optimizer: EmbOptimType
) -> list[list[torch.Tensor]]:
    """The state from the chain, and from the full checkpoint of the same step."""
    states = []
    for seed, folder in enumerate((root, f"{root}-full"), 5):
        model, dense = build(group, plan, optimizer, seed)
        store = CheckpointStore(folder)
        newest = store.latest()
        assert newest is not None and newest.step == 7 and newest.extra == {"at": 7}
        store.load(newest, model, dense, group)
        states.append(
            state_of(model, dense)[0 if newest.manifest.world_size == (group.size() if group else 1) else 1 :]
        )
    return states


def save_all(group: dist.ProcessGroup, root: str) -> None:
    for plan, optimizer in CASES:
        save_chain(group, f"{root}/{plan}-{optimizer.value}", plan, optimizer)


def load_all(group: dist.ProcessGroup, root: str) -> list[str]:
    """The cases in which the chain differs from the full checkpoint. On two ranks the plan is the saved one."""
    different = []
    for number, (saved, optimizer) in enumerate(CASES):
        others = [plan for plan, _ in CASES[number + 1 :] + CASES if plan not in ("dense", saved)]
        plan = saved if group.size() == 2 or saved == "dense" else others[0]
        chain, full = load_both(group, f"{root}/{saved}-{optimizer.value}", plan, optimizer)
        if len(chain) != len(full) or not all(torch.equal(a, b) for a, b in zip(chain, full, strict=True)):
            different.append(f"{optimizer.value}: saved as {saved}, loaded as {plan}")
    return different


@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((2, 5), marks=pytest.mark.long)], ids=str)
def test_a_chain_loads_as_the_full_checkpoint_of_its_step(tmp_path: Path, worlds: tuple[int, int]) -> None:
    """Saved under every plan, with every optimizer; loaded under other plans, on other numbers of ranks."""
    on_ranks(2, save_all, str(tmp_path))
    for world in worlds:
        assert [different for different in on_ranks(world, load_all, str(tmp_path)) if different] == []


def run_alone(root: Path, steps: tuple[int, ...] = (5, 6, 7), keep: int | None = None) -> Any:
    """A full checkpoint of step 3 and increments of some steps; returns (model, optimizer, store)."""
    model, dense = build(None, "rw", EmbOptimType.EXACT_ADAGRAD)
    store, step = CheckpointStore(root, keep=keep), 3
    store.track_changes(model)
    train(model, dense, None, range(3))
    store.save(3, model, dense)
    for last in steps:
        train(model, dense, None, range(step, last))
        assert store.save_increment(last, model, dense, Saving()) is Started.STARTED
        store.finish()
        step = last
    return model, dense, store


def newest_good(root: Path) -> tuple[int, list[str]]:
    """(step of the newest checkpoint that loads, what is wrong with the newer ones)"""
    store, errors = CheckpointStore(root), []
    candidates, damaged = store.candidates()
    for checkpoint in candidates:
        try:
            store.load(checkpoint, *build(None, "tw", EmbOptimType.EXACT_ADAGRAD, 1))
        except DamagedCheckpointError as error:
            errors.append(str(error))
            continue
        return checkpoint.step, [*map(str, damaged), *errors]
    raise AssertionError(errors)


@pytest.mark.parametrize("fault", ["missing", "bytes", "manifest", "exchanged", "base"])
def test_a_gap_and_damage_are_named_and_the_longest_good_chain_loads(tmp_path: Path, fault: str) -> None:
    run_alone(tmp_path / "run")
    _, at_6, at_7 = sorted((tmp_path / "run").glob("*.increment-*"))
    if fault == "missing":
        shutil.rmtree(at_6)
    elif fault == "bytes":
        data = bytearray((at_6 / "data-00000.safetensors").read_bytes())
        tensors = json.loads((at_6 / "index.json").read_text())["tensors"]
        data[next(saved["pieces"][0][3] for key, saved in tensors.items() if key.startswith("values/"))] ^= 1
        (at_6 / "data-00000.safetensors").write_bytes(data)
    elif fault == "manifest":
        (at_6 / "manifest.json").write_text((at_6 / "manifest.json").read_text().replace('"step": 6', '"step": 8'))
    elif fault == "exchanged":  # of another run
        run_alone(tmp_path / "other", (4, 6))
        shutil.rmtree(at_6)
        shutil.copytree(next((tmp_path / "other").glob("*.increment-00000006-*")), at_6)
    else:
        shutil.rmtree(tmp_path / "run" / "step_00000003-0001")
    if fault == "base":
        with pytest.raises(AssertionError, match="step_00000003-0001, which it has the changes since, is missing"):
            newest_good(tmp_path / "run")
        return
    step, errors = newest_good(tmp_path / "run")
    assert step == 5
    words = {
        "missing": rf"{at_7.name} is damaged: manifest.json: {at_6.name}, which it has the changes since, is missing",
        "bytes": f"{at_6.name} is damaged: data-00000.safetensors",
        "manifest": f"{at_6.name} is damaged: manifest.json: its text does not match its checksum",
        "exchanged": f"{at_6.name} is not the checkpoint that it has the changes since",
    }
    assert words[fault] in " ".join(errors)


def test_a_failed_increment_leaves_its_changes_to_the_next_one(tmp_path: Path) -> None:
    model, dense, store = run_alone(tmp_path, (5,))
    train(model, dense, None, range(5, 6))
    in_the_way = tmp_path / "step_00000003-0001.increment-00000006-0001"
    in_the_way.write_text("")
    assert store.save_increment(6, model, dense, Saving()) is Started.STARTED
    store.finish()
    assert [outcome.step for outcome in store.ended() if outcome.error is not None] == [6]
    in_the_way.unlink()
    train(model, dense, None, range(6, 7))
    store.save_increment(7, model, dense, Saving())
    store.finish()
    expected, (other, other_dense) = state_of(model, dense), build(None, "cw", EmbOptimType.EXACT_ADAGRAD, 9)
    newest = CheckpointStore(tmp_path).latest()
    assert newest is not None and newest.step == 7
    CheckpointStore(tmp_path).load(newest, other, other_dense)
    assert all(torch.equal(a, b) for a, b in zip(state_of(other, other_dense), expected, strict=True))


def test_small_changes_are_small_and_chains_stay_whole(tmp_path: Path) -> None:
    model, dense, store = run_alone(tmp_path, (4, 5), keep=1)
    (full,) = tmp_path.glob("step_00000003-0001")
    assert store.save_increment(6, model, dense, Saving()) is Started.STARTED  # nothing was trained
    store.finish()
    sizes = {path.name[-13:-5]: sum(f.stat().st_size for f in path.iterdir()) for path in tmp_path.glob("*.inc*")}
    assert sizes["00000006"] < sizes["00000004"] < 0.2 * sum(file.stat().st_size for file in full.iterdir())
    for step in range(7, 40):  # until half of the bytes
        if store.save_increment(step, model, dense, Saving()) is Started.FULL_IS_DUE:
            break
        store.finish()
    assert 10 < step < 39
    assert len(list(tmp_path.glob("step_00000003-0001*"))) == step - 3  # keep=1: a full one and its chain
    removed = store.latest()
    store.save(step, model, dense)
    assert [path.name for path in tmp_path.glob("step_*")] == [f"step_{step:08d}-0001"]
    assert removed is not None and removed.manifest.link is not None
    with pytest.raises(RemovedCheckpointError, match=removed.name):  # a command had just chosen it
        store.reader(removed)


def test_a_resumed_run_goes_on_with_the_chain(tmp_path: Path) -> None:
    run_alone(tmp_path, (5, 6))
    model, dense = build(None, "rw", EmbOptimType.EXACT_ADAGRAD, 4)
    store = CheckpointStore(tmp_path)
    store.track_changes(model)
    newest = store.latest()
    assert newest is not None
    store.load(newest, model, dense)
    train(model, dense, None, range(6, 7))
    assert store.save_increment(7, model, dense, Saving()) is Started.STARTED
    store.finish()
    assert newest_good(tmp_path) == (7, [])
    other, other_dense = build(None, "cw", EmbOptimType.EXACT_ADAGRAD, 9)
    newest = store.latest()
    assert newest is not None and newest.manifest.link is not None and newest.manifest.link.sequence == 3
    store.load(newest, other, other_dense)
    uninterrupted, its_dense = build(None, "tw", EmbOptimType.EXACT_ADAGRAD)
    train(uninterrupted, its_dense, None, range(7))
    pairs = zip(state_of(other, other_dense)[1:], state_of(uninterrupted, its_dense)[1:], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # Another plan may have row-wise state of other columns: a full checkpoint comes first.
    store.track_changes(other)
    store.load(newest, other, other_dense)
    assert store.save_increment(8, other, other_dense, Saving()) is Started.FULL_IS_DUE


def test_the_chain_that_a_run_goes_on_with_is_kept(tmp_path: Path) -> None:
    """Also while a full checkpoint of an earlier attempt, damaged, has a later step."""
    model, dense, store = run_alone(tmp_path, (5,))
    store.save(7, model, dense)
    damaged = tmp_path / "step_00000007-0001" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 7', '"step": 8'))
    store = CheckpointStore(tmp_path, keep=1)
    store.track_changes(model)
    newest = store.latest()
    assert newest is not None and newest.step == 5
    store.load(newest, model, dense)
    store.note_scores(5, {"ne": 1.0})  # removes old ones
    assert newest_good(tmp_path)[0] == 5
    train(model, dense, None, range(5, 6))
    assert store.save_increment(6, model, dense, Saving()) is Started.STARTED
    store.finish()
    CheckpointStore(tmp_path).prune(1)  # of another process, which has loaded none
    assert newest_good(tmp_path)[0] == 6
    store.save(8, model, dense)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000008-0002"]


def test_rectangles_of_a_chain_are_parts_of_its_tensors(tmp_path: Path) -> None:
    """Rectangles that cut the changed rows and columns of the writers in any way."""
    _, _, store = run_alone(tmp_path)
    newest = store.latest()
    assert newest is not None
    with store.reader(newest) as reader:
        key = next(key for key in reader.index.tensors if key.startswith("table/") and key.endswith(".a"))
        whole = reader.tensor(key)
        for rows, columns in (
            (slice(0, 1), slice(3, 4)),
            (slice(17, 4001), slice(0, 5)),
            (slice(4001, 9001), slice(5, 12)),
        ):
            part = torch.zeros_like(whole[rows, columns])
            reader.fill({key: Rectangles(whole.shape, [Rectangle((rows.start, columns.start), part)])})
            assert torch.equal(part, whole[rows, columns])
            assert torch.equal(reader.tensor(key, rows), whole[rows])
