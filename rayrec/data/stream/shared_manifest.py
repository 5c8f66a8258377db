"""A manifest that is held once, by an actor on the driver's node, and of which a worker gets its own part."""

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
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering, ShareColumns, RankShare
from rayrec.data.order.mix import Mix
from rayrec.data.source.filters import Condition
from rayrec.data.source.manifest import Manifest
from rayrec.storage.errors import DataUnavailable
from rayrec.storage.parallel import actor_here, answer

SENT_WHOLE_BYTES = 256 << 10  # less than this is sent to every worker: an actor is a process
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class SharedManifest:
    """Stands for a manifest in workers, and asks its holder for what they read.

    Args:
        rows, num_files, nbytes, columns, filters, leaves_out: the manifest's.
        fingerprint: the manifest's.
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
        """Starts the holder, on this node; Ray makes another, should its process end.

        Args:
            folder: of this node, where the holder finds the manifest, then too.
        """
        file = folder / f"{manifest.fingerprint}.pickle"
        file.write_bytes(pickle.dumps(manifest))
        about = {one.name: getattr(manifest, one.name) for one in fields(cls) if one.name != "holder"}
        return cls(actor_here(EpochPlanner, file), **about)

    @property
    def parts(self) -> tuple[SharedManifest, ...]:
        return (self,)

    def open(self, cursor: Cursor, ordering: Ordering, rank: int, world_size: int) -> RankShare:
        """As `EpochPlanner.open`."""
        found: RankShare = self._answer(self.holder.open.remote(cursor, ordering, rank, world_size))
        return found

    def pieces(self, part: RankShare, passed: int) -> ShareColumns:
        """As `EpochPlanner.pieces`."""
        found: ShareColumns = self._answer(self.holder.pieces.remote(part, passed))
        return found

    def _answer(self, ref: Any) -> Any:
        """
        Raises:
            DataUnavailable: the holder does not answer.
        """
        import ray

        try:
            return answer(ref, _PATIENCE_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise DataUnavailable(
                f"the driver's node has not said for {_PATIENCE_S:g} s which rows this rank reads",
                fix="check that it is up and reachable; the run goes on at its last checkpoint",
            ) from error


Planner = EpochPlanner | SharedManifest


def planner_of(manifest: Manifest | SharedManifest) -> Planner:
    """Who says what a rank reads of it."""
    return manifest if isinstance(manifest, SharedManifest) else EpochPlanner(manifest)


@contextmanager
def shared(*data: Manifest | SharedManifest | Mix | None, sent_whole: int = SENT_WHOLE_BYTES) -> Iterator[list[Any]]:
    """The same data sets, to be sent to the workers of this Ray: large ones are held by an actor each for so long.

    Args:
        sent_whole: bytes up to which a manifest is sent as it is.
    """
    import ray

    with ExitStack() as held:
        holders: dict[int, SharedManifest] = {}

        def share(manifest: Any) -> Any:
            if not isinstance(manifest, Manifest) or manifest.nbytes <= sent_whole:
                return manifest
            if id(manifest) not in holders:
                folder = Path(held.enter_context(TemporaryDirectory(prefix="rayrec-")))
                holders[id(manifest)] = found = SharedManifest.of(manifest, folder)
                held.callback(_end, ray, found.holder)
            return holders[id(manifest)]

        yield [replace(one, parts=tuple(map(share, one.parts))) if isinstance(one, Mix) else share(one) for one in data]


def _end(ray: Any, actor: Any) -> None:
    with suppress(Exception):  # the cluster may be gone
        ray.kill(actor)
