"""Which attempt of a run owns its folder of checkpoints.

An attempt takes the folder over by writing its number, a token of its own and its launch into `attempt.json`. Whoever
finds another token there later has been replaced: a rank that hung while its run was started again must not commit or
remove anything. Every attempt writes into folders of its own name, so that it cannot touch the bytes of another's.

A rank that is frozen between `check` and what it writes then may still commit. That does no harm: checkpoints are in
the order of their attempts, and its attempt is older than the one that has gone on.
"""

from __future__ import annotations

import errno
import json
import re
import uuid
from dataclasses import asdict, dataclass

from rayrec.checkpoint.errors import FencedError, TakenOverError
from rayrec.checkpoint.launch import FILE, Launch, holder
from rayrec.storage.folder import Folder

_FILE = "attempt.json"
_NAME = re.compile(r"step_(\d{8,})(?:-(\d{4,}))?")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One owner of a folder of checkpoints.

    Args:
        launch: whose attempt it is, where the run has a driver that holds the folder.
    """

    number: int
    token: str
    launch: Launch | None = None

    @classmethod
    def claim(cls, root: Folder, launch: Launch | None = None) -> Attempt:
        """Take the folder over. One process of a run does it, at its start.

        Raises:
            TakenOverError: another launch holds it.
            OSError: the folder cannot be read or written; also where the launch has lost its hold of it.
        """
        if launch is not None:
            _check_holder(root, launch)
        earlier = [order[0] for name in root.names() if (order := order_of(name))]
        mine = cls(max([_read(root).number, *earlier]) + 1, uuid.uuid4().hex, launch)
        by = {} if launch is None else {"launch": asdict(launch)}
        root.write(_FILE, json.dumps({"attempt": mine.number, "token": mine.token, **by}).encode())
        return mine

    def check(self, root: Folder) -> None:
        """That the folder is still this attempt's.

        Raises:
            FencedError: it is another attempt's; TakenOverError: of another launch.
        """
        owner = _read(root)
        if owner.token == self.token:
            return
        if self.launch is not None and owner.launch is not None and owner.launch.token != self.launch.token:
            raise TakenOverError(root.path, str(owner.launch))
        raise FencedError(
            f"{root.path} belongs to attempt {owner.number} of the run; attempt {self.number} may no longer write there"
        )


def folder_name(step: int, attempt: int) -> str:
    return f"step_{step:08d}-{attempt:04d}"


def order_of(name: str) -> tuple[int, int] | None:
    """(attempt, step) of a checkpoint's folder, by which a later one is larger; None for other folders.

    After damage an attempt goes on from an older step than another has left, so steps alone do not say what is newest.
    """
    match = _NAME.fullmatch(name)
    return (int(match[2] or 0), int(match[1])) if match else None


def _check_holder(root: Folder, launch: Launch) -> None:
    found = holder(root)
    if found is None:
        why = "it is gone: the storage is not mounted here, or another launch of the run came and ended meanwhile"
        raise FileNotFoundError(errno.ENOENT, why, f"{root.path}/{FILE}")
    if found.token != launch.token:
        raise TakenOverError(root.path, str(found))


def _read(root: Folder) -> Attempt:
    """Who owns a folder; attempt 0 where nobody does."""
    try:
        raw = json.loads(root.read(_FILE))
        return Attempt(int(raw["attempt"]), str(raw["token"]), Launch.of(raw.get("launch")))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Attempt(0, "")
