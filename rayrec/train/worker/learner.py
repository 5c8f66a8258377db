"""The sharded model with its optimizers: how it is made, one training step, one scoring pass. Knows no epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed.comm import call_on_rank
from rayrec.distributed.comm.trace import BACKWARD, FORWARD, UPDATE, span
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.models import Batch
from rayrec.optim import GradientClippingOptimizer
from rayrec.train.errors import TrainError
from rayrec.train.planning.groups import Decision, decide
from rayrec.train.setup import build
from rayrec.train.worker.accumulate import step_in_parts
from rayrec.train.worker.dense_update import DenseUpdate, Rates
from rayrec.train.worker.machine import topology_of
from rayrec.train.worker.session import Job, Session


@dataclass(frozen=True, slots=True)
class Learner:
    """A sharded model and the optimizer of its dense part, tables with a dense kernel among it; that of the other
    tables is fused into backward.

    Args:
        decision: the sharding groups, and the plan of each with its estimate.
        logit_shift: added to logits when scoring. Trained on all positives and a part w of the negatives, the model's
            probability p stands for p / (p + (1 - p) / w), which is the logit plus log(w) (He et al., "Practical
            lessons from predicting clicks on ads at Facebook", 2014, section 6.3).
        micro_batches: parts that a batch is worked through in.
        bf16: products of the dense part are made in bfloat16 while training.
        dense: when the dense optimizer steps, and with what; `rates`: how fast each part learns.
    """

    model: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    decision: Decision
    logit_shift: float
    micro_batches: int
    bf16: bool
    dense: DenseUpdate
    rates: Rates

    @property
    def world_size(self) -> int:
        """Ranks of all groups."""
        return self.decision.layout.world_size

    def synchronise(self) -> None:
        """Makes the tables of all groups alike; a collective between two steps."""
        if isinstance(self.model, DMPCollection):
            self.model.sync()

    def _step_optimizers(self, number: int) -> None:
        with span(UPDATE):
            self.rates.hold(number)
            self.dense.after_backward(self.optimizer)
            if isinstance(self.model, DMPCollection):
                self.model.after_step()

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

    def step(self, batch: Batch, share: float, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on one batch of each rank, as one process would on all of them together.

        Args:
            batch: this rank's rows; may be empty.
            share: this rank's part of the weights of all ranks' rows (of the rows themselves where they have none).
            number: of the step, counted from 0: some parameters may stand still in the first ones.

        Returns:
            (this rank's mean loss, logits `[B]`), both detached; the loss of an empty batch is 0.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.micro_batches > 1:
            with self._precision(batch):
                found = step_in_parts(self.model, batch, share * self.world_size, self.micro_batches)
            self._step_optimizers(number)
            return found
        with span(FORWARD), self._precision(batch):
            loss, logits = self.model(batch)
        # Gradients are averaged over ranks, whatever their rows: weigh each rank's mean by its share.
        # An empty batch takes part with a gradient of zero, so that the exchanges of backward line up.
        weighed = loss * (share * self.world_size) if batch.rows else logits.sum() * 0.0
        with span(BACKWARD):
            weighed.backward()
        self._step_optimizers(number)
        detached: torch.Tensor = loss.detach() if batch.rows else weighed.detach()
        return detached, logits.detach()

    def _precision(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch.dense.device.type, dtype=torch.bfloat16, enabled=self.bf16)

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
    topology = topology_of(session.machines, job.calibration)
    here = (config, topology, module, sharders)
    decision = decide(*here) if session.group is None else call_on_rank(session.group, 0, decide, *here)
    model = _sharded(module, decision, sharders, config.sharding.sync_every, session)
    # Dropout differs between ranks; weights, drawn before, do not.
    torch.manual_seed(config.trainer.seed * 10_007 + session.rank)
    optimizer = build.dense_optimizer(config, model.dense_parameters())
    if config.trainer.compile_dense:
        _compile_dense(model)
    shift, trainer = math.log(config.data.negative_rate), config.trainer
    others = model.other_parameters()
    if trainer.accumulate_steps > 1 and others.keys() != model.dense_parameters().keys():
        raise TrainError(
            "trainer.accumulate_steps: tables with a dense kernel cannot wait; set it to 1, or give them another one "
            "in sharding.constraints"
        )
    return Learner(
        model,
        optimizer,
        decision,
        shift,
        trainer.micro_batches,
        trainer.dense_precision == "bf16",
        DenseUpdate(others, trainer.accumulate_steps, config.optimizers.dense.ema),
        Rates(config, model.fused_optimizer, model.dense_parameters()),
    )


def _compile_dense(model: DistributedModelParallel) -> None:
    """Compiles the model's layers that hold no table, each by itself, for any number of rows."""
    sharded = model.sharded_modules()
    for name, layer in model.module.named_children():
        holds_tables = any(path == name or path.startswith(f"{name}.") for path in sharded)
        if not holds_tables and any(True for _ in layer.parameters()):
            layer.compile(dynamic=True)


def _sharded(
    module: torch.nn.Module, decision: Decision, sharders: list[Any], sync_every: int, session: Session
) -> DistributedModelParallel:
    layout = decision.layout
    if session.group is None or layout.replicas == 1:
        return DistributedModelParallel(
            module, env=session.env, device=session.device, plan=decision.plan, sharders=sharders
        )
    group = layout.group_of(session.rank)
    return DMPCollection(
        module,
        session.device,
        decision.plan,
        layout.world_size,
        layout.group_size,
        session.group,
        node_group_size=sum(rank in group for rank in session.neighbours),
        sharders=sharders,
        use_inter_host_allreduce=True,
        sync_every=sync_every,
    )
