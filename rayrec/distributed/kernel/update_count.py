"""Counting a kernel's updates where fbgemm wants the count beforehand.

Adam and its relatives correct their bias by the number of updates. fbgemm takes it with the forward, and would count
forwards, evaluations too; here a forward is told the number of the update that its backward will make.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakSet

import torch


class UpdateCount:
    """Updates that have happened, and lookups whose backward may still come."""

    def __init__(self) -> None:
        self.done = 0
        self._pending: WeakSet[_Pending] = WeakSet()  # one goes with its graph, if backward never comes

    @property
    def pending(self) -> bool:
        """Whether a lookup that may train has not had its backward."""
        return len(self._pending) > 0

    @property
    def before_next(self) -> int:
        """Updates that come before the one of a lookup that begins now."""
        return self.done + len(self._pending)

    def expect(self, out: torch.Tensor) -> None:
        """Counts the update of the node that made `out`, when its backward begins; nothing where there is none."""
        if out.grad_fn is not None:
            pending = _Pending()
            self._pending.add(pending)
            out.grad_fn.register_prehook(partial(self._happens, pending))

    def _happens(self, pending: _Pending, *_: object) -> None:
        self._pending.discard(pending)
        self.done += 1


class _Pending:
    pass
