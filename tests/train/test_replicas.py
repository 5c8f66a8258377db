"""Runs of replicated sharding groups: one training with one group, one kind of checkpoint, a group that ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train import ConfigError, evaluate_run, parse_config
from tests.ranks import RankError, on_ranks
from tests.train.small import Silent, fit_job, fit_on_rank, make_job, raw_config, write_all
from tests.train.test_checkpoints import tensors_of
from tests.train.test_loop import PLANS


def run(folder: Path, name: str, world: int, **sharding: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a run ended with: its outcome, and all that its last checkpoint holds."""
    raw = raw_config(folder, name=name, trainer__num_workers=world, sharding=sharding)
    outcome = on_ranks(world, fit_on_rank, raw)[0]
    return outcome, tensors_of(folder / "runs" / name)


def assert_alike(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    names = {key for key in some if key.split("/")[0] in ("table", "dense", "table_state", "dense_state")}
    assert names and names == {key for key in others if key in names}
    for key in names:
        torch.testing.assert_close(some[key], others[key], atol=1e-5, rtol=1e-5, msg=lambda text: f"{key}: {text}")  # noqa: B023


def test_groups_that_meet_every_step_are_one_training(tmp_path: Path) -> None:
    write_all(tmp_path, rows=500)
    constraints = {**PLANS["row_wise"], "tag": {"sharding_types": ["data_parallel"]}}
    one, of_one = run(tmp_path, "one", 4, constraints=constraints)
    two, of_two = run(tmp_path, "two", 4, constraints=constraints, replicas=2)
    assert two["steps"] == one["steps"]
    assert two["eval"]["auc"] == pytest.approx(one["eval"]["auc"], abs=1e-4)
    assert_alike(of_one, of_two)
    folder = tmp_path / "runs" / "two"
    config = parse_config(raw_config(tmp_path, name="two", trainer__num_workers=4, sharding={"replicas": 2}))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    scored = evaluate_run(folder)
    assert scored["auc"] == pytest.approx(two["eval"]["auc"], abs=1e-5)  # in one process


class Breaking(nn.Module):
    """A DLRM that ends the first group's process in a step."""

    def __init__(self, fails_at: int, **args: Any) -> None:
        super().__init__()
        self.inner = DLRM(**args)
        self.steps_left = fails_at

    def forward(self, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            self.steps_left -= 1
            if self.steps_left == 0 and dist.get_rank() == 0:
                raise KeyError("the first group is gone")
        return self.inner(batch)


def breaking(**args: Any) -> nn.Module:
    return Breaking(**args)


def first_plan(group: dist.ProcessGroup, raw: dict[str, Any]) -> Any:
    told = Silent()
    outcome = fit_job(make_job(raw), group, told)
    plans = [record["plan"] for record in told.records if record["kind"] == "plan"]
    return outcome, plans[0] if plans else None


@pytest.mark.long
def test_a_run_goes_on_after_the_end_of_a_group(tmp_path: Path) -> None:
    """Broken in step 11, resumed from step 6: as if nothing had happened; then one group of both ranks goes on."""
    write_all(tmp_path, rows=900)
    ended = {}
    for name, fails_at in (("straight", 0), ("broken", 11)):
        args = {"dense_arch": [16, 8], "over_arch": [16, 1], "fails_at": fails_at}
        model = {"factory": "tests.train.test_replicas:breaking", "args": args}
        sharding = {
            "constraints": {"tag": {"sharding_types": ["data_parallel"]}},
            "replicas": 2,
            "sync_every": 4,
        }
        raw = raw_config(tmp_path, name=name, model=model, trainer__epochs=1, trainer__num_workers=2, sharding=sharding)
        if fails_at:
            with pytest.raises(RankError, match="the first group is gone"):
                on_ranks(2, first_plan, raw)
            args["fails_at"] = 0
        outcome, told = on_ranks(2, first_plan, raw)[0]
        ended[name] = outcome["steps"], tensors_of(tmp_path / "runs" / name)
        facts = told["replicas"]
        assert (facts["groups"], facts["workers"], facts["sync_every"]) == (2, 1, 4)
        assert facts["sync_bytes"] > 0 and len(told["memory"]) == 1
    assert ended["straight"][0] == ended["broken"][0] == 15
    for key, tensor in ended["straight"][1].items():
        if key != "tensor/window/sums":  # seconds
            assert torch.equal(ended["broken"][1][key], tensor), key
    raw = {**raw, "trainer": {**raw["trainer"], "epochs": 2}, "sharding": {"constraints": PLANS["table_wise"]}}
    outcome, told = on_ranks(2, first_plan, raw)[0]
    assert outcome["steps"] == 30 and "replicas" not in told


def test_groups_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_all(tmp_path, rows=100)
    with pytest.raises(ConfigError, match=r"sharding.replicas: 3 workers .* cannot .* 2 groups .* allowed: 1, 3"):
        parse_config(raw_config(tmp_path, sharding={"replicas": 2}, trainer__num_workers=3))
    plan = tmp_path / "plan.json"
    raw = raw_config(tmp_path, name="planned", trainer__epochs=1, sharding={"constraints": PLANS["row_wise"]})
    _, told = on_ranks(2, first_plan, raw)[0]
    plan.write_text(json.dumps(told))
    raw = raw_config(tmp_path, name="wrong", trainer__num_workers=2, sharding={"plan": str(plan), "replicas": 2})
    with pytest.raises(
        RankError, match=r"places shards on 2 ranks, but each of 2 groups .* has 1 of the 2 workers"
    ) as e:
        on_ranks(2, first_plan, raw)
    assert "rank 0" in str(e.value) and "rank 1" in str(e.value)
