"""The bases of planner parts of one's own, which speak of what is in `parts.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.parts import Proposal, ShardingOption

if TYPE_CHECKING:
    from torch import nn

    from rayrec.distributed.planner.topology import Topology
    from rayrec.distributed.planner.types import ParameterConstraints


class PerfModel(ABC):
    """Rates plans; the lowest rating wins."""

    @abstractmethod
    def rate(self, plan: Proposal) -> float:
        """Of a plan whose shards have ranks."""


class ShardEstimator(ABC):
    """Fills in the costs of shards."""

    @abstractmethod
    def __init__(self, topology: Topology, constraints: Mapping[str, ParameterConstraints] | None = None) -> None: ...

    @abstractmethod
    def estimate(self, sharding_options: Proposal, sharder_data_map: Mapping[str, Any] | None = None) -> None:
        """Sets `storage` or `perf` of every shard."""


class Enumerator(ABC):
    """Lists ways to shard every table."""

    @abstractmethod
    def __init__(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None: ...

    @abstractmethod
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> Proposal:
        """All ways of all tables."""

    @abstractmethod
    def populate_estimates(self, sharding_options: Proposal) -> None:
        """Fills in the costs of shards."""


class Proposer(ABC):
    """Picks a way for each table, again and again."""

    @abstractmethod
    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        """Takes all ways of all tables."""

    @abstractmethod
    def propose(self) -> Proposal | None:
        """One way for each table; None when there are no more proposals."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """What became of the last proposal."""


class Partitioner(ABC):
    """Gives the shards of a proposal ranks."""

    @abstractmethod
    def partition(self, proposal: Proposal, storage_constraint: Topology) -> Proposal:
        """The proposal with ranks.

        Raises:
            PlannerError: it does not fit.
        """


class Stats(ABC):
    """Tells what was planned."""

    @abstractmethod
    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        """Called with the plan, how many proposals there were (`num_proposals`), how many fitted (`num_plans`), and the
        options that won (`best_plan`)."""


class PlanLoader(ABC):
    """Brings a plan's options from elsewhere, by their hashes."""

    @abstractmethod
    def load(self) -> dict[int, ShardingOption] | None: ...

    @abstractmethod
    def plan_context_hash(self) -> str | None: ...
