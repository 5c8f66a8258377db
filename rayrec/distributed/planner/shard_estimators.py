"""Estimators, for those who pass one by hand: `EmbeddingEnumerator` fills its options in with the planner's own costs
(`cost.py`, `storage.py`), and these leave them so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.distributed.planner.bases import ShardEstimator
from rayrec.distributed.planner.parts import Proposal
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import ParameterConstraints
from rayrec.torchrec.distributed.types import PipelineType

__all__ = ["EmbeddingPerfEstimator", "EmbeddingStorageEstimator", "ShardEstimator"]


class EmbeddingPerfEstimator(ShardEstimator):
    """The planner's milliseconds.

    Args:
        topology, constraints: kept for who reads them.
        is_inference: taken and not needed.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self.topology, self.constraints = topology, constraints

    def estimate(self, sharding_options: Proposal, sharder_data_map: Mapping[str, Any] | None = None) -> None:
        """The enumerator has."""


class EmbeddingStorageEstimator(EmbeddingPerfEstimator):
    """The planner's bytes.

    Args:
        topology, constraints, is_inference: as of `EmbeddingPerfEstimator`.
        pipeline_type, run_embedding_at_peak_memory: taken and not needed.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        super().__init__(topology, constraints, is_inference)
