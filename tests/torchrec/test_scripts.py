"""Every script loses under rayrec what it loses under TorchRec, and goes on from a checkpoint that TorchRec wrote."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.torchrec import losses as scripts
from tests.torchrec.losses import FOLDER, STEPS, names, script
from tests.torchrec.states import PLAIN, SHARDED, described, joined, train_and_save

RECORDED = Path(__file__).parent / "recorded"
LOSSES = json.loads((RECORDED / "losses.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours() -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for world in (1, 2):
        by_rank = on_ranks(world, losses_of_rank)
        found |= {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
    return found


def losses_of_rank(group: dist.ProcessGroup) -> dict[str, list[float]]:
    return scripts.losses("rayrec.torchrec", group.size())


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_are_torchrecs(ours: dict[str, list[list[float]]], name: str) -> None:
    for rank, (of_ours, of_theirs) in enumerate(zip(ours[name], LOSSES[name], strict=True)):
        assert len(of_theirs) == STEPS and of_theirs[0] != of_theirs[-1]
        for step, (mine, theirs) in enumerate(zip(of_ours, of_theirs, strict=True)):
            assert math.isclose(mine, theirs, abs_tol=1e-5), f"{name}, step {step}, rank {rank}: {mine}, not {theirs}"


def test_there_are_ten_scripts_and_half_of_them_run_on_two_ranks() -> None:
    assert len(LOSSES) == 10 and len(names(1)) == len(names(2)) == 5


STATES = json.loads((RECORDED / "states.json").read_text(encoding="utf-8"))


def resumed(group: dist.ProcessGroup, folder: str, cuts: str, kind: Any = None) -> Any:
    from rayrec.torchrec.distributed import sharding_plan as by

    world = group.size()

    def fused_replicas(table: Any) -> Any:
        return replace(by.data_parallel()(table), compute_kernel="fused")

    generators = {
        "table_wise": {"t_a": by.table_wise(0), "t_b": by.table_wise(world - 1)},
        "row_wise": {"t_a": by.row_wise(), "t_b": by.row_wise()},
        "column_wise": {"t_a": by.row_wise(), "t_b": by.column_wise([0, world - 1])},
        "replicated": {"t_a": fused_replicas, "t_b": by.row_wise()},
    }[cuts]
    space = script(FOLDER / "checkpoint.py", "rayrec.torchrec")
    return space["resume"](str(RECORDED / folder), STEPS, generators, kind or space["RowWiseAdagrad"])


@pytest.mark.parametrize(("world", "cuts"), [(1, "table_wise"), (2, "table_wise"), (2, "row_wise")])
def test_a_checkpoint_that_torchrec_wrote_goes_on_under_any_plan(world: int, cuts: str) -> None:
    """With equal batches on every rank, the mean over ranks is the loss of one."""
    expected = LOSSES["checkpoint"][0][STEPS // 2 :]
    for losses in on_ranks(world, resumed, "checkpoint", cuts):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("world", "cuts"), [(1, "table_wise"), (2, "row_wise"), (2, "column_wise"), (2, "replicated")])
def test_a_checkpoint_of_two_ranks_of_torchrecs_goes_on_under_any_plan(world: int, cuts: str) -> None:
    """Tables' optimizer too: columns of one table lay on both ranks."""
    expected = STATES["losses"][0]
    for losses in on_ranks(world, resumed, SHARDED.name, cuts, torch.optim.Adagrad):
        assert losses == pytest.approx(expected, abs=1e-5)


def saved(group: dist.ProcessGroup, folder: str) -> Any:
    return train_and_save("rayrec.torchrec", folder)


def test_state_of_two_ranks_is_laid_out_as_torchrecs(tmp_path: Path) -> None:
    """Keys, shapes, types, and which rank holds which part: what TorchRec needs to load it."""
    answers = on_ranks(2, saved, str(tmp_path))
    assert joined([answer["state"] for answer in answers]) == STATES["state"]
    assert [answer["losses"] for answer in answers] == [pytest.approx(losses, abs=1e-5) for losses in STATES["losses"]]
    for losses in on_ranks(2, resumed, str(tmp_path), "row_wise", torch.optim.Adagrad):
        assert losses == pytest.approx(STATES["losses"][0], abs=1e-5)


def loaded_plain(group: dist.ProcessGroup, cuts: str) -> Any:
    """A plain state_dict in a sharded model, and what the model then says its state is."""
    space = script(FOLDER / "checkpoint.py", "rayrec.torchrec")
    state = torch.load(PLAIN)
    by = {"t_a": space["table_wise"](0), "t_b": space["table_wise"](group.size() - 1)}
    model, _ = space["build"](space["SHARDED"]() if cuts == "column_wise" else by)
    model.load_state_dict(state)
    found = {}
    for key, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            found[key] = [(list(part.metadata.shard_offsets), part.tensor) for part in value.local_shards()]
        else:
            found[key] = [([0, 0], value)]
    return found


@pytest.mark.parametrize(("world", "cuts"), [(1, "table_wise"), (2, "table_wise"), (2, "column_wise")])
def test_a_plain_state_dict_of_torchrecs_loads_under_any_plan(world: int, cuts: str) -> None:
    state = torch.load(PLAIN)
    assert set(state) == {"ebc.embedding_bags.t_a.weight", "ebc.embedding_bags.t_b.weight", "over.bias", "over.weight"}
    seen = dict.fromkeys(state, 0)
    for found in on_ranks(world, loaded_plain, cuts):
        for key, parts in found.items():
            for (row, col), part in [((*at, 0)[:2], part) for at, part in parts]:
                whole = state[key]
                held = whole if whole.dim() < 2 else whole[row : row + part.shape[0], col : col + part.shape[1]]
                assert torch.equal(part, held), key
                seen[key] += part.numel()
    assert all(count >= state[key].numel() for key, count in seen.items())


def test_what_is_described_tells_states_apart() -> None:
    one = {"a": torch.zeros(2, 3), "b": [1, None]}
    assert described(one) == {"a": {"tensor": [2, 3], "dtype": "torch.float32"}, "b": [1, None]}
    assert joined([{"a": 1}, {"a": 1, "b": 2}]) == {"a": 1, "b": 2}
