"""How long a planned step takes where ranks wait for each other and may share processors.

For what compares estimates with measured steps; the planner itself compares ranks by the sum of their own seconds
(`Estimate.worst_s`).
"""

from __future__ import annotations

import numpy as np

from rayrec.distributed.planner.cost.estimate import Estimate, Floats
from rayrec.distributed.planner.cost.terms import Cost

EXCHANGES = (("input_intra", "input_inter"), ("output_intra", "output_inter"), ("gradient_intra", "gradient_inter"))


def step_on(estimate: Estimate, processors: int, alone: float = 1.0) -> float:
    """Return the seconds of the embedding part of a step; ranks wait for each other at every exchange.

    Exchange times already include all ranks. Between exchanges, ranks work at first all at once and at the end only the
    busiest, and ranks that work slow each other down (`slowdown`).

    Args:
        processors: of all ranks together, possibly fewer than ranks.
        alone: `Device.alone`.
    """

    def of(*terms: str) -> Floats:
        return np.asarray(estimate.cost_RT[:, [Cost._fields.index(term) for term in terms]].sum(axis=1))

    exchanges = sum(float(of(*terms).max()) for terms in EXCHANGES)
    works = [of("lookup"), of("backward", "host") + estimate.routing_s]
    return estimate.collectives_s + exchanges + sum(_together(work, processors, alone) for work in works)


def _together(work_R: Floats, processors: int, alone: float) -> float:
    """Return the seconds until all ranks are done; between the ends of the (k+1)-th and k-th busiest, k ranks work."""
    falling = np.append(np.sort(work_R)[::-1], 0.0)
    slow = [slowdown(count, len(work_R), processors, alone) for count in range(1, len(work_R) + 1)]
    return float(((falling[:-1] - falling[1:]) * slow).sum())


def slowdown(count: int, ranks: int, processors: int, alone: float) -> float:
    """Return the factor on a rank's work while `count` of `ranks` work; 1 if all work, each on its own processor.

    A single working rank needs `alone`; each further one adds the same amount (shared caches and memory). More ranks
    than processors take turns.
    """
    most = min(ranks, processors)
    crowd = alone + (1.0 - alone) * (min(count, most) - 1) / (most - 1) if most > 1 else 1.0
    return crowd * max(1.0, count / processors)
