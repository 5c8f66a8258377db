"""The train function that Ray Train's controller hands to its workers: light, as the controller imports it too."""

from __future__ import annotations

from typing import Any


def start_worker(handed: dict[str, Any]) -> None:
    """`handed` has the `job` as bytes and the mailbox actor, `log`."""
    from ray import cloudpickle

    from rayrec.train.worker.entry import work_on_ray

    work_on_ray(cloudpickle.loads(handed["job"]), handed["log"])
