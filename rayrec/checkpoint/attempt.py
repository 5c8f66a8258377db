"""Which attempt of a run owns its folder of checkpoints.

An attempt takes the folder over by writing its number and a token of its own into `attempt.json`. Whoever finds another
token there later has been replaced: a rank that hung while its run was started again must not commit or remove
anything. Every attempt writes into folders of its own name, so that it cannot touch the bytes of another's.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass

from rayrec.checkpoint.errors import FencedError
from rayrec.checkpoint.folder import Folder

_FILE = "attempt.json"
_NAME = re.compile(r"step_(\d{8,})(?:-(\d{4,}))?")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One owner of a folder of checkpoints."""

    number: int
    token: str

    @classmethod
    def claim(cls, root: Folder) -> Attempt:
        """Take the folder over. One process of a run does it, at its start.

        Raises:
            OSError: the folder cannot be read or written.
        """
        earlier = [order[0] for name in root.names() if (order := order_of(name))]
        mine = cls(max([_read(root)[0], *earlier]) + 1, uuid.uuid4().hex)
        root.write(_FILE, json.dumps({"attempt": mine.number, "token": mine.token}).encode())
        return mine

    def check(self, root: Folder) -> None:
        """That the folder is still this attempt's.

        Raises:
            FencedError: it is not.
        """
        number, token = _read(root)
        if token != self.token:
            raise FencedError(
                f"{root.path} belongs to attempt {number} of the run; attempt {self.number} may no longer write there"
            )


def folder_name(step: int, attempt: int) -> str:
    return f"step_{step:08d}-{attempt:04d}"


def order_of(name: str) -> tuple[int, int] | None:
    """(attempt, step) of a checkpoint's folder, by which a later one is larger; None for other folders.

    After damage an attempt goes on from an older step than another has left, so steps alone do not say what is newest.
    """
    match = _NAME.fullmatch(name)
    return (int(match[2] or 0), int(match[1])) if match else None


def _read(root: Folder) -> tuple[int, str]:
    try:
        raw = json.loads(root.read(_FILE))
        return int(raw["attempt"]), str(raw["token"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0, ""
