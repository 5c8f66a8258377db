"""Ranks whose nodes do not share the folder of checkpoints find out at the start, not after days."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointError, CheckpointStore, ownership
from rayrec.checkpoint.ownership import LAUNCH_FILE, Attempt, Launch
from rayrec.distributed import EmbOptimType
from tests.checkpoint.test_store import build
from tests.ranks import PerRank, on_ranks


def claims(group: Any, path: Path, within_s: float) -> tuple[str, float]:
    """The error of a rank, and the seconds until then."""
    ownership.SHOWN_WITHIN_S, before = within_s, ownership.SHOWN_WITHIN_S
    start = time.monotonic()
    try:
        CheckpointStore(path).claim(group)
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    finally:
        ownership.SHOWN_WITHIN_S = before
    return "", time.monotonic() - start


def test_ranks_on_other_disks_are_named_on_every_rank(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path / "b").root  # what is left of an earlier run does not pass for this one
    for _ in range(3):
        Attempt.claim(old)
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "b"]
    errors = on_ranks(4, claims, PerRank(paths), 1.0)
    for path, (text, _) in zip(paths, errors, strict=True):
        assert "what rank 0 on node" in text and "(ranks 1–3)" in text and "set storage.path" in text, path
    assert [text for text, _ in on_ranks(4, claims, tmp_path / "a", 60.0)] == [""] * 4


def test_a_folder_that_is_seen_later_is_waited_for(tmp_path: Path) -> None:
    """Clients of NFS cache listings."""
    mine, root = Launch.here(), CheckpointStore(tmp_path).root

    def show() -> None:
        root.write(LAUNCH_FILE, json.dumps({"launch": asdict(mine), "beat": 0.0}).encode())

    timer = threading.Timer(0.3, show)
    timer.start()
    attempt = Attempt.claim(root, mine, within_s=30)
    assert attempt.is_shown_in(root)
    later = Attempt.claim(root, mine)
    assert attempt.is_shown_in(root) and later.is_shown_in(root), "a rank that is slow sees the next attempt"


def test_the_driver_sees_another_folder(tmp_path: Path) -> None:
    mine = Launch.here()
    with pytest.raises(CheckpointError, match=f"the driver on node {mine.host} wrote, was not found on node"):
        Attempt.claim(CheckpointStore(tmp_path).root, mine, within_s=0.2)


def saves(group: Any, path: Path, later: Path) -> str:
    """The error of a save after the folder's file system was replaced on this rank."""
    ownership.SHOWN_WITHIN_S, before = 1.0, ownership.SHOWN_WITHIN_S
    try:
        store = CheckpointStore(path)
        store.claim(group)
        store.root = CheckpointStore(later).root
        model, optimizer = build(group, "rw", EmbOptimType.EXACT_ADAGRAD, 1)
        with pytest.raises(TimeoutError) as caught:
            store.save(1, model, optimizer, group=group)
        return str(caught.value)
    finally:
        ownership.SHOWN_WITHIN_S = before


def test_a_save_does_not_wait_forever_for_files_that_went_elsewhere(tmp_path: Path) -> None:
    """A node that loses its mount writes to the empty folder below it."""
    errors = on_ranks(2, saves, tmp_path / "a", PerRank([tmp_path / "a", tmp_path / "b"]))
    for text in errors:
        assert "files that other ranks have written (part-00001.json) do not appear on node" in text
    assert not list(tmp_path.glob("*/*/manifest.json"))
