"""TorchRec's estimators. They leave the costs unchanged, which `EmbeddingEnumerator` has set already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.torchrec.distributed.planner.bases import ShardEstimator
from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.parts import Proposal
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.distributed.types import PipelineType
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingPerfEstimator", "EmbeddingStorageEstimator", "ShardEstimator"]


class EmbeddingPerfEstimator(ShardEstimator):
    """Keeps the milliseconds of the enumerator.

    Args:
        topology, constraints: stored as attributes.
        is_inference: ignored.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self.topology, self.constraints = topology, constraints

    def estimate(self, sharding_options: Proposal, sharder_data_map: Mapping[str, Any] | None = None) -> None:
        """Do nothing; the enumerator has set the costs."""


class EmbeddingStorageEstimator(EmbeddingPerfEstimator):
    """Keeps the bytes of the enumerator.

    Args:
        topology, constraints, is_inference: see `EmbeddingPerfEstimator`.
        pipeline_type, run_embedding_at_peak_memory: ignored.
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
