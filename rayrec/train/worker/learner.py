"""The sharded model with its optimizers: how it is made, one training step, one scoring pass. Knows no epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.data.order.epoch import dealt
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.planner import EmbeddingShardingPlanner
from rayrec.distributed.planner.estimate import Estimate
from rayrec.distributed.types import ShardingPlan
from rayrec.models import Batch
from rayrec.optim import GradientClippingOptimizer
from rayrec.train import build
from rayrec.train.worker.accumulate import step_in_parts
from rayrec.train.worker.machine import topology_of
from rayrec.train.worker.session import Job, Session


@dataclass(frozen=True, slots=True)
class Learner:
    """A sharded model and the optimizer of its dense part, tables with a dense kernel among it; that of the other
    tables is fused into backward.

    Args:
        logit_shift: added to logits when scoring. Trained on all positives and a part w of the negatives, the model's
            probability p stands for p / (p + (1 - p) / w), which is the logit plus log(w) (He et al., "Practical
            lessons from predicting clicks on ads at Facebook", 2014, section 6.3).
        micro_batches: parts that a batch is worked through in.
        estimate: what the planner expects the plan to cost each rank; rank 0 has it.
    """

    model: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    plan: ShardingPlan
    world_size: int
    logit_shift: float = 0.0
    estimate: Estimate | None = None
    micro_batches: int = 1

    def set_learning_rates(self, dense: float, sparse: float) -> None:
        """Those of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = dense
        fused = self.model.fused_optimizer
        if any(group["lr"] != sparse for group in fused.param_groups):
            for group in fused.param_groups:
                group["lr"] = sparse
            fused.settings_changed()

    def gradient_norm(self) -> float | None:
        """Of the dense parameters (tables apart) after a step, before it was clipped; None where there are none. Waits
        for the device."""
        if isinstance(self.optimizer, GradientClippingOptimizer) and self.optimizer.last_total_grad_norm is not None:
            return float(self.optimizer.last_total_grad_norm)
        grads = [p.grad for p in self.model.other_parameters().values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else None

    def is_finite(self) -> bool:
        """Whether all dense parameters (tables apart) are finite numbers. Waits for the device."""
        params = [p.detach() for p in self.model.other_parameters().values()]
        return not params or bool(torch.nn.utils.get_total_norm(params).isfinite())

    def step(self, batch: Batch, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on one batch of each rank, as one process would on all of them together.

        Args:
            batch: this rank's rows; may be empty.
            share: this rank's part of the weights of all ranks' rows (of the rows themselves where they have none).

        Returns:
            (this rank's mean loss, logits `[B]`), both detached; the loss of an empty batch is 0.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.micro_batches > 1:
            found = step_in_parts(self.model, batch, share * self.world_size, self.micro_batches)
            self.optimizer.step()
            return found
        loss, logits = self.model(batch)
        # Gradients are averaged over ranks, whatever their rows: weigh each rank's mean by its share.
        # An empty batch takes part with a gradient of zero, so that the exchanges of backward line up.
        weighed = loss * (share * self.world_size) if batch.rows else logits.sum() * 0.0
        weighed.backward()
        self.optimizer.step()
        detached: torch.Tensor = loss.detach() if batch.rows else weighed.detach()
        return detached, logits.detach()

    def score(self, batch: Batch) -> torch.Tensor:
        """Logits of a batch as they hold for all rows, without training; a collective like `step`."""
        with torch.no_grad():
            _, logits = self.model(batch)
        return logits + self.logit_shift if self.logit_shift else logits


def make_learner(job: Job, session: Session) -> Learner:
    """Build the model, plan on rank 0, shard on every rank.

    Raises:
        RankError: the model cannot be built, on any rank.
        ValueError: no plan fits.
    """
    config = job.config
    module = session.control.together(lambda: build.model(config, session.device, job.factory))
    sharders = build.sharders(config)
    planner = _planner(job, session)
    plan = build.given_plan(config, session.world_size) or _planned(planner, session, module, sharders)
    tells = session.rank == 0  # the driver, at the start
    estimate = session.control.together(lambda: planner.estimate(plan, module, sharders) if tells else None)
    model = DistributedModelParallel(module, env=session.env, device=session.device, plan=plan, sharders=sharders)
    # Dropout differs between ranks; weights, drawn before, do not.
    torch.manual_seed(config.trainer.seed * 10_007 + session.rank)
    optimizer = build.dense_optimizer(config, model.dense_parameters())
    return Learner(
        model,
        optimizer,
        plan,
        session.world_size,
        math.log(config.data.negative_rate),
        estimate,
        config.trainer.micro_batches,
    )


def _planner(job: Job, session: Session) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=topology_of(session.machines, job.calibration),
        batch_size=dealt(job.config.trainer.batch_size, 0, session.world_size),
        constraints=build.constraints(job.config),
    )


def _planned(
    planner: EmbeddingShardingPlanner, session: Session, module: torch.nn.Module, sharders: list[Any]
) -> ShardingPlan:
    if session.group is None:
        return planner.plan(module, sharders)
    return planner.collective_plan(module, sharders, session.group)
