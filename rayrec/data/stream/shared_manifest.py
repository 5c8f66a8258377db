"""A manifest in an actor on the driver's node. Workers ask it for their share instead of holding a copy."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from rayrec.data.order.cursor import Cursor
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering, Planner, RankShare, ShareColumns
from rayrec.data.order.mix import Mix
from rayrec.data.source.filters import Condition
from rayrec.data.source.manifest import Manifest
from rayrec.storage.errors import DataUnavailable
from rayrec.storage.parallel import actor_here, answer

# Smaller manifests are sent to every worker, because an actor costs a process.
SENT_WHOLE_BYTES = 256 << 10
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class SharedManifest:
    """A worker's handle of a manifest; asks the actor what to read.

    Args:
        holder: the actor, an `EpochPlanner`.
        Others as in `Manifest`.
    """

    holder: Any
    rows: int
    num_files: int
    nbytes: int
    fingerprint: str
    columns: tuple[tuple[str, pa.DataType], ...]
    filters: tuple[Condition, ...]
    leaves_out: bool

    @classmethod
    def of(cls, manifest: Manifest, folder: Path) -> SharedManifest:
        """Starts the actor on this node. Ray restarts it if its process ends.

        Args:
            folder: local folder for the pickled manifest, which the actor reads at each start.
        """
        file = folder / f"{manifest.fingerprint}.pickle"
        file.write_bytes(pickle.dumps(manifest))
        facts = {column.name: getattr(manifest, column.name) for column in fields(cls) if column.name != "holder"}
        return cls(actor_here(EpochPlanner, file), **facts)

    @property
    def parts(self) -> tuple[SharedManifest, ...]:
        return (self,)

    def open(self, cursor: Cursor, ordering: Ordering, rank: int, world_size: int) -> RankShare:
        """As `EpochPlanner.open`."""
        share: RankShare = self._answer(self.holder.open.remote(cursor, ordering, rank, world_size))
        return share

    def next_blocks(self, share: RankShare, passed: int) -> ShareColumns:
        """As `EpochPlanner.next_blocks`."""
        columns: ShareColumns = self._answer(self.holder.next_blocks.remote(share, passed))
        return columns

    def _answer(self, ref: Any) -> Any:
        """
        Raises:
            DataUnavailable: the actor does not answer.
        """
        import ray

        try:
            return answer(ref, _PATIENCE_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise DataUnavailable(
                f"timeout: the manifest actor on the driver node did not answer within {_PATIENCE_S:g} s",
                fix="check that the node is up and reachable; the run resumes from its last checkpoint",
            ) from error


def planner_of(manifest: Manifest | SharedManifest) -> Planner:
    """The object that computes what a rank reads."""
    return manifest if isinstance(manifest, SharedManifest) else EpochPlanner(manifest)


@contextmanager
def shared(*data: Manifest | SharedManifest | Mix | None, sent_whole: int = SENT_WHOLE_BYTES) -> Iterator[list[Any]]:
    """The data sets in a form to send to workers. Within the block, an actor holds each large manifest.

    Args:
        sent_whole: maximum bytes of a manifest that is sent itself.
    """
    import ray

    with ExitStack() as open_actors:
        holders: dict[int, SharedManifest] = {}

        def share(manifest: Any) -> Any:
            if not isinstance(manifest, Manifest) or manifest.nbytes <= sent_whole:
                return manifest
            if id(manifest) not in holders:
                folder = Path(open_actors.enter_context(TemporaryDirectory(prefix="rayrec-")))
                holders[id(manifest)] = handle = SharedManifest.of(manifest, folder)
                open_actors.callback(_end, ray, handle.holder)
            return holders[id(manifest)]

        yield [
            replace(data_set, parts=tuple(map(share, data_set.parts))) if isinstance(data_set, Mix) else share(data_set)
            for data_set in data
        ]


def _end(ray: Any, actor: Any) -> None:
    with suppress(Exception):  # the cluster may be gone
        ray.kill(actor)
