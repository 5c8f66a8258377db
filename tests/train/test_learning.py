"""Losses, averaged weights, gradients over several steps, tables with optimizers of their own and frozen parameters:
the same as plain torch in one process, on any number of ranks, and across a resume."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rayrec.models import DLRM, Batch, mean_loss
from rayrec.models.loss import Head, pairwise_loss
from rayrec.models.loss_config import Bce, Focal, Mse, Pairwise
from rayrec.train import ConfigError, TrainError, parse_config
from tests.ranks import PerRank, on_ranks
from tests.train.small import fit_job, fit_on_rank, learner_of, make_job, rank_session, raw_config, write_all
from tests.train.test_loop import PLANS, batches, in_turn, joined, with_likes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("learning"), rows=280)


def raw_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Every seam at once: tables of three optimizers, one frozen at first, a frozen layer, an average."""
    raw = raw_config(folder, **changes)
    raw["optimizers"] = {
        "dense": {"kind": "adam", "lr": 0.01, "ema": 0.5},
        "sparse": {"kind": "sgd", "lr": 0.1},
        "tables": {"user": {"lr": 0.4}, "item": {"kind": "adagrad", "lr": 0.05}},
        "freeze": [{"names": "tag", "until": 3}, {"names": "dense_arch.*"}],
    }
    raw["model"]["loss"] = {"kind": "focal", "gamma": 1.5, "alpha": 0.6}
    return raw


def trained(group: dist.ProcessGroup | None, raw: dict[str, Any], steps: list[Batch], probe: Batch) -> torch.Tensor:
    """Logits of the averaged model after the steps."""
    session = rank_session(group)
    learner = learner_of(make_job(raw), session)
    for number, given in enumerate(in_turn(steps, raw, session.control)):
        learner.rates.set(number, learner.optimizer, 0.01, 0.1)
        learner.step(given.batch, given.share, number)
    learner.model.eval()
    with learner.dense.averaged():
        return learner.score(probe)


def plain(raw: dict[str, Any], steps: list[Batch], probe: Batch) -> torch.Tensor:
    """The same by torch alone: one process, an unsharded model, torch's optimizers."""
    job = make_job(raw)
    given: dict[str, Any] = {}

    def keeping(**arguments: Any) -> DLRM:
        given.update(arguments)
        return DLRM(**arguments)

    learner = learner_of(replace(job, factory=keeping))
    model = DLRM(**{**given, "device": "cpu", "tables_device": "cpu"})
    for head in (module for module in model.modules() if isinstance(module, Head)):
        head.loss = Focal(**raw["model"]["loss"])
    bags = model.embedding_bags.embedding_bags
    with torch.no_grad():
        for name, table in learner.model.tables().items():
            bags[name.rpartition(".")[2]].weight.copy_(table.local[0].weight)
        own = dict(model.named_parameters())
        for name, parameter in learner.model.other_parameters().items():
            own[name].copy_(parameter)
    dense = {name: p for name, p in own.items() if not name.startswith("embedding_bags")}
    adam = torch.optim.Adam([p for name, p in dense.items() if not name.startswith("dense_arch")], lr=0.01)
    rows = [torch.optim.SGD([bags["user"].weight], 0.4), torch.optim.Adagrad([bags["item"].weight], 0.05, eps=1e-8)]
    tag = torch.optim.SGD([bags["tag"].weight], 0.1)
    average = {name: p.detach().clone() for name, p in dense.items()}
    for number, batch in enumerate(steps):
        model.zero_grad(set_to_none=True)
        model(batch)[0].backward()
        for optimizer in rows + ([tag] if number >= 3 else []):
            optimizer.step()
        adam.step()
        average = {name: average[name] * 0.5 + p.detach() * 0.5 for name, p in dense.items()}
    with torch.no_grad():
        for name, parameter in dense.items():
            parameter.copy_(average[name])
        return model(probe)[1]


def test_one_process_is_plain_torch_and_ranks_are_one_process(folder: Path) -> None:
    raw = raw_of(folder)
    steps = [batches([5, 3], seed) for seed in range(6)]
    probe = batches([9], 77)[0]
    whole = [joined(step) for step in steps]
    wanted = plain(raw, whole, probe)
    torch.testing.assert_close(trained(None, raw, whole, probe), wanted, atol=1e-5, rtol=1e-5)
    dealt_out = PerRank([[step[rank] for step in steps] for rank in range(2)])
    for plan in ("mixed", "row_wise"):
        split = copy.deepcopy(raw) | {"sharding": {"constraints": PLANS[plan]}}
        for logits in on_ranks(2, trained, split, dealt_out, probe):
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    for seam in ("ema", "tables", "freeze", "loss"):  # each of them is seen by the probe
        other = copy.deepcopy(raw)
        of = {"ema": other["optimizers"]["dense"], "loss": other["model"]}
        of.get(seam, other["optimizers"]).pop(seam)
        assert not torch.allclose(trained(None, other, whole, probe), wanted, atol=1e-3), seam


def test_a_run_that_goes_on_is_the_run_in_one_piece(folder: Path) -> None:
    """An epoch has 5 steps: the resume falls between two steps of the dense optimizer."""
    whole = fit_job(make_job(raw_of(folder, name="whole", trainer__epochs=2)))
    for epochs in (1, 2):
        parts = fit_job(make_job(raw_of(folder, name="parts", trainer__epochs=epochs)))
    assert parts["eval"] == whole["eval"] and parts["steps"] == whole["steps"] == 10
    for epochs, name in [(2, "whole on 2"), (1, "parts on 2"), (2, "parts on 2")]:
        raw = raw_of(folder, name=name.replace(" ", "-"), trainer__epochs=epochs)
        ended = on_ranks(2, fit_on_rank, raw)[0]
        whole = ended if name == "whole on 2" else whole
    assert ended["eval"] == whole["eval"] and ended["steps"] == 10


def test_losses_are_their_formulas() -> None:
    """Also of several labels with weights, some not observed."""
    batch = with_likes(batches([50], 3, weighted=True)[0], 5)
    assert batch.weight is not None
    logits = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
    p, y = logits.sigmoid(), batch.label
    formulas = {
        Bce(): -(y * p.log() + (1 - y) * (1 - p).log()),
        Mse(): (p - y) ** 2,
        Focal(gamma=2.0): -(y * (1 - p) ** 2 * p.log() + (1 - y) * p**2 * (1 - p).log()),
        Focal(gamma=0.0, alpha=0.3): -(0.3 * y * p.log() + 0.7 * (1 - y) * (1 - p).log()),
        Bce(label_smoothing=0.2): -((0.8 * y + 0.1) * p.log() + (0.9 - 0.8 * y) * (1 - p).log()),
        Bce(positive_weight=3.0): -(3 * y * p.log() + (1 - y) * (1 - p).log()),
    }
    for loss, each in formulas.items():
        wanted = (each.nan_to_num().sum(1) * batch.weight).sum() / batch.weight.sum()
        torch.testing.assert_close(mean_loss(logits, batch, loss=loss), wanted)
    one = batches([20], 4)[0]
    torch.testing.assert_close(
        mean_loss(logits[:20, 0], one, loss=Mse()), F.mse_loss(logits[:20, 0].sigmoid(), one.label)
    )


def test_the_pairwise_loss_is_its_formula() -> None:
    batch = batches([30], 3, weighted=True)[0]
    assert batch.weight is not None
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))
    positive, negative = (
        (batch.label > 0.5).nonzero().flatten().tolist(),
        (batch.label < 0.5).nonzero().flatten().tolist(),
    )
    pairs = [(i, j, float(batch.weight[i] * batch.weight[j])) for i in positive for j in negative]
    wanted = sum(w * math.log1p(math.exp(float(logits[j] - logits[i]))) for i, j, w in pairs) / sum(
        w for *_, w in pairs
    )
    assert float(pairwise_loss(logits, batch)) == pytest.approx(wanted, rel=1e-5)
    alike = replace(batch, label=torch.ones(30))
    assert float(pairwise_loss(logits, alike)) == 0.0  # no pairs


def test_the_pairwise_loss_is_over_the_rows_of_all_ranks(folder: Path) -> None:
    """Also where a rank has no rows, or none of one kind. The last bias has no gradient, which Adam would divide by."""
    raw = raw_config(folder, model__loss="pairwise", optimizers__dense={"kind": "sgd", "lr": 0.1})
    for sizes in ([5, 3], [7, 0, 2]):
        steps = [batches(sizes, seed, weighted=True) for seed in range(4)]
        probe = batches([9], 77, weighted=True)[0]
        wanted = trained(None, raw, [joined(step) for step in steps], probe)
        dealt_out = PerRank([[step[rank] for step in steps] for rank in range(len(sizes))])
        for logits in on_ranks(len(sizes), trained, raw, dealt_out, probe):
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    ordinary = trained(None, {**raw, "model": raw_config(folder)["model"]}, [joined(step) for step in steps], probe)
    assert not torch.allclose(ordinary, wanted, atol=1e-3)


def scores_of_one_rank(group: dist.ProcessGroup) -> torch.Tensor | None:
    """What the first rank scores alone, in evaluation."""
    head = Head(None).eval()
    head.loss = Pairwise()
    head.on_sharded(group)
    batch = batches([5], 3)[0]
    return head(torch.arange(5.0)[:, None], batch)[1] if group.rank() == 0 else None


def test_an_evaluation_gathers_no_rows_for_the_pairwise_loss() -> None:
    first, _ = on_ranks(2, scores_of_one_rank)
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model__loss": "pairwise", "trainer__micro_batches": 2},
            "trainer.micro_batches: model.loss pairwise compares",
        ),
        (
            {"model__loss": {"kind": "pairwise", "label_smoothing": 0.1}},
            "model.loss.label_smoothing: the loss pairwise does not have this field",
        ),
        ({"model__loss": "focal2"}, "model.loss.kind: got 'focal2'; did you mean 'focal'?; allowed"),
        (
            {"model__loss": {"kind": "focal", "label_smoothing": 0.1}},
            "the loss focal does not have this field (it has",
        ),
        (
            {"model__loss": "listnet"},
            "model.loss: listnet compares the rows of a group, such as a user: set",
        ),
        ({"model__loss": "huber"}, "model.loss: huber needs a label of `kind: number`"),
        ({"optimizers__tables": {"usr": {"lr": 1.0}}}, "optimizers.tables.usr: no table is named 'usr'; did you mean"),
    ],
)
def test_wrong_settings_are_named(folder: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_config(raw_config(folder, **changes))


def test_what_a_model_does_not_have_is_named(folder: Path) -> None:
    job = make_job(raw_config(folder, optimizers__freeze=[{"names": "over_arc.*"}]))
    with pytest.raises(TrainError, match=r"optimizers\.freeze\.0\.names: no table or parameter matches 'over_arc\.\*'"):
        learner_of(job)
    job = make_job(raw_config(folder, model__loss="focal"))
    with pytest.raises(TrainError, match="the model computes its own loss"):
        learner_of(replace(job, factory=lambda **_: torch.nn.Linear(1, 1)))
    dense = {"constraints": PLANS["dense"]}
    with pytest.raises(TrainError, match="dense kernel"):
        raw = raw_config(folder, sharding=dense, optimizers__tables={"user": {"lr": 0.1}})
        learner_of(make_job(raw))
    freeze = [{"names": "tag", "until": 3}, {"names": "user"}]
    with pytest.raises(TrainError, match="share a kernel"):
        learner_of(make_job(raw_config(folder, optimizers__freeze=freeze)))
