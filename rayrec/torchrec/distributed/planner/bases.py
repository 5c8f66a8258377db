"""Base classes of the planner's components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.parts import Proposal, ShardingOption
from rayrec.torchrec.distributed.planner.topology import Topology

if TYPE_CHECKING:
    from torch import nn


class PerfModel(ABC):
    """Rates plans; the lowest rating wins."""

    @abstractmethod
    def rate(self, plan: Proposal) -> float:
        """Return the rating of a plan with ranks."""


class ShardEstimator(ABC):
    """Sets the costs of shards."""

    @abstractmethod
    def __init__(self, topology: Topology, constraints: Mapping[str, ParameterConstraints] | None = None) -> None: ...

    @abstractmethod
    def estimate(self, sharding_options: Proposal, sharder_data_map: Mapping[str, Any] | None = None) -> None:
        """Set `storage` or `perf` of every shard."""


class Enumerator(ABC):
    """Lists the sharding options of every table."""

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
        """Return all options of all tables."""

    @abstractmethod
    def populate_estimates(self, sharding_options: Proposal) -> None:
        """Set the costs of shards."""


class Proposer(ABC):
    """Proposes one option for each table, repeatedly."""

    @abstractmethod
    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        """Load all options of all tables."""

    @abstractmethod
    def propose(self) -> Proposal | None:
        """Return one option for each table; None after the last proposal."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Receive the result of the last proposal."""


class Partitioner(ABC):
    """Assigns ranks to the shards of a proposal."""

    @abstractmethod
    def partition(self, proposal: Proposal, storage_constraint: Topology) -> Proposal:
        """Return the proposal with ranks.

        Raises:
            PlannerError: the proposal does not fit.
        """


class Stats(ABC):
    """Reports a plan."""

    @abstractmethod
    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        """Report the plan.

        Args:
            more: `num_proposals`, `num_plans` (proposals that fit) and `best_plan` (its options), among others.
        """


class PlanLoader(ABC):
    """Loads the options of a plan, by their hashes."""

    @abstractmethod
    def load(self) -> dict[int, ShardingOption] | None: ...

    @abstractmethod
    def plan_context_hash(self) -> str | None: ...


class StorageReservation(ABC):
    """Reserves memory that a plan must leave free."""

    _last: Topology | None = None

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int = 0,
        module: nn.Module | None = None,
        sharders: Sequence[Any] = (),
        constraints: Mapping[str, Any] | None = None,
    ) -> Topology:
        """Return the topology minus the reserved memory.

        Args:
            topology: the cluster.
            batch_size, module, sharders, constraints: the arguments of planning.
        """

    @property
    def last_reserved_topology(self) -> Topology | None:
        """The last return value of `reserve`."""
        return self._last
