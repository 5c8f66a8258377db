"""The sharded model with its optimizers: builds them, runs a training step, and scores a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from rayrec.data.mapping.rules import Dynamic
from rayrec.distributed.comm import call_on_rank
from rayrec.distributed.comm.trace import BACKWARD, FORWARD, UPDATE, span
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.models import Batch, Retriever
from rayrec.models.next_item import NextItem
from rayrec.optim import GradientClippingOptimizer
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build
from rayrec.train.setup.dynamic_ids import shared_maps
from rayrec.train.setup.groups import Decision, decide
from rayrec.train.worker.dense_update import DenseUpdate, Rates
from rayrec.train.worker.dynamic_tables import DynamicTables
from rayrec.train.worker.machine import topology_of
from rayrec.train.worker.micro_batches import step_in_micro_batches
from rayrec.train.worker.session import Job, Session


@dataclass(frozen=True, slots=True)
class Learner:
    """A sharded model and its optimizers.

    `optimizer` updates the dense part, which includes tables with a dense kernel. The optimizer of the other tables is
    fused into backward.

    Args:
        decision: the sharding groups, and the plan of each group with its estimate.
        logit_shift: added to logits in scoring. A model trained on all positives and a share w of the negatives
            predicts p for a true probability of p / (p + (1 - p) / w), which is the logit plus log(w) (He et al.,
            "Practical lessons from predicting clicks on ads at Facebook", 2014, section 6.3).
        micro_batches: number of micro-batches of a step.
        bf16: matrix products of the dense part use bfloat16 in training.
        dense: the optimizer step of the dense part.
        rates: sets the learning rates.
        dynamic: the maps of tables with dynamic ids; None without any.
    """

    model: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    decision: Decision
    logit_shift: float
    micro_batches: int
    bf16: bool
    dense: DenseUpdate
    rates: Rates
    dynamic: DynamicTables | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks over all sharding groups."""
        return self.decision.layout.world_size

    def synchronise(self) -> None:
        """Average the tables of all sharding groups. A collective, between two steps."""
        if isinstance(self.model, DMPCollection):
            self.model.sync()

    def _step_optimizers(self, number: int) -> None:
        with span(UPDATE):
            self.rates.drop_frozen_gradients(number)
            self.dense.step(self.optimizer)
            if isinstance(self.model, DMPCollection):
                self.model.after_step()

    def gradient_norm(self) -> float | None:
        """Gradient norm of the dense parameters without tables, before clipping. Waits for the device.

        Returns:
            None if no dense parameter has a gradient.
        """
        if isinstance(self.optimizer, GradientClippingOptimizer) and self.optimizer.last_total_grad_norm is not None:
            return float(self.optimizer.last_total_grad_norm)
        grads = [p.grad for p in self.model.other_parameters().values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else None

    def take_sent_ids(self) -> list[int]:
        """Ids that this rank sent to each rank of its sharding group in training since the last call; empty without
        sharded tables. Waits for nothing."""
        collections = self.model.sharded_modules().values()
        return [sum(counts) for counts in zip_longest(*(c.take_sent_ids() for c in collections), fillvalue=0)]

    def is_finite(self) -> bool:
        """Whether all dense parameters, without tables, are finite. Waits for the device."""
        params = [p.detach() for p in self.model.other_parameters().values()]
        return not params or bool(torch.nn.utils.get_total_norm(params).isfinite())

    def step(self, batch: Batch, share: float, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on a batch of each rank. The result equals a step of one process on all batches together.

        Args:
            batch: this rank's rows; may be empty.
            share: this rank's fraction of the row weights of all ranks.
            number: number of the step, counted from 0; parameters may be frozen in the first steps.

        Returns:
            (this rank's mean loss, logits `[B]`), both detached; the loss of an empty batch is 0.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.micro_batches > 1:
            with self._precision(batch):
                loss_and_logits = step_in_micro_batches(self.model, batch, share * self.world_size, self.micro_batches)
            self._step_optimizers(number)
            return loss_and_logits
        with span(FORWARD), self._precision(batch):
            loss, logits = self.model(batch)
        # DDP averages gradients over ranks regardless of their numbers of rows, so each rank's mean is weighted by its
        # share. An empty batch contributes a zero gradient, because all ranks must call the collectives of backward.
        weighted = loss * (share * self.world_size) if batch.rows else logits.sum() * 0.0
        with span(BACKWARD):
            weighted.backward()
        self._step_optimizers(number)
        detached: torch.Tensor = loss.detach() if batch.rows else weighted.detach()
        return detached, logits.detach()

    def _precision(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch.dense.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def score(self, batch: Batch) -> torch.Tensor:
        """Logits of a batch, corrected for negatives that training dropped. A collective like `step`."""
        with torch.no_grad():
            _, logits = self.model(batch)
        return logits + self.logit_shift if self.logit_shift else logits


def make_learner(job: Job, session: Session) -> Learner:
    """Build the model, plan on rank 0, and shard on every rank. A collective.

    Raises:
        RankError: the model cannot be built on some rank.
        ValueError: no plan fits.
    """
    config = job.config
    module = session.control.together(lambda: _module(job, session))
    sharders = build.sharders(config)
    topology = topology_of(session.machines, job.calibration)
    inputs = (config, topology, module, sharders)
    decision = decide(*inputs) if session.group is None else call_on_rank(session.group, 0, decide, *inputs)
    model = _sharded(module, decision, sharders, config.sharding.sync_every, session)
    # Weights are drawn before this and are the same on all ranks; dropout differs between ranks.
    torch.manual_seed(config.trainer.seed * 10_007 + session.rank)
    optimizer = build.dense_optimizer(config, model.dense_parameters())
    if config.trainer.compile_dense:
        _compile_dense(model)
    shift, trainer = math.log(config.data.negative_rate), config.trainer
    shared = shared_maps(config)
    if isinstance(module, Retriever) and module.item in config.data_schema.dynamic:
        _check_items(module, config.data_schema.dynamic[module.item], config)
    return Learner(
        model,
        optimizer,
        decision,
        shift,
        trainer.micro_batches,
        trainer.dense_precision == "bf16",
        DenseUpdate(model.other_parameters(), config.optimizers.dense.ema),
        Rates(config, model.fused_optimizer, model.dense_parameters()),
        DynamicTables(shared, model, session.control.group) if shared else None,
    )


def _check_items(retriever: Retriever, rule: Dynamic, config: TrainConfig) -> None:
    """Nothing of a retriever whose items have dynamic ids is known by row before training."""
    if retriever.loss.lacks_counts:
        raise TrainError(
            f"model.loss.counts: item {retriever.item!r} has dynamic ids, whose rows change owners; remove `counts`, "
            "and use sampler `uniform` or a loss with in-batch negatives"
        )
    if rule.unseen == "zero":
        raise TrainError(
            f"item {retriever.item!r}: `unseen: zero` leaves ids out, but each target needs one; set `unseen: hashed`"
        )
    if config.trainer.ranking.seen_file is not None:
        raise TrainError(
            f"trainer.ranking.seen_file: item {retriever.item!r} has dynamic ids, whose rows are not known before "
            "training; name features with seen items in trainer.ranking.seen"
        )


def _module(job: Job, session: Session) -> torch.nn.Module:
    module, schema = build.model(job.config, session.device, job.factory), job.config.data_schema
    if isinstance(module, Retriever):
        module.loss.use_corpus(build.items_of(module, schema))
    if isinstance(module, NextItem):
        module.longest = next((one.max_length for one in schema.sparse if one.name == module.item), None)
    return module


def _compile_dense(model: DistributedModelParallel) -> None:
    """Compile each layer of the model that contains no table, for any number of rows."""
    sharded = model.sharded_modules()
    for name, layer in model.module.named_children():
        has_tables = any(path == name or path.startswith(f"{name}.") for path in sharded)
        if not has_tables and any(True for _ in layer.parameters()):
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
