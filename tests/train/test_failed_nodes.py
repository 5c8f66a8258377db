"""A node whose GPU fails is left out when the workers restart, while the other nodes have room."""

from __future__ import annotations

import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train import Display, Trainer, parse_config
from rayrec.train.errors import is_broken_device, is_device_fault, is_retryable
from tests.forked import run_forked
from tests.train.small import raw_config, write_all

ROOT = Path(__file__).resolve().parents[2]
FAULT = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        (FAULT, True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("NVRM: Xid 79: GPU has fallen off the bus", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_errors_that_a_kernel_may_have_caused_leave_no_node_out(text: str, leaves: bool) -> None:
    error = torch.AcceleratorError(text)
    assert is_device_fault(error) and is_retryable(error)
    assert is_broken_device(error) is leaves


def test_a_gpu_that_is_gone_at_the_start_is_a_device_fault() -> None:
    assert is_broken_device(RuntimeError("No CUDA GPUs are available")) and not is_broken_device(RuntimeError("Xidle"))
    assert not is_broken_device(ValueError(FAULT))


class Faulty(nn.Module):
    """A model whose step fails on the node that is written in a file; the file names the first node of rank 1."""

    def __init__(self, inner: nn.Module, file: Path) -> None:
        super().__init__()
        self.inner, self.file, self.steps = inner, file, 0

    def forward(self, batch: Batch) -> Any:
        import ray
        import torch.distributed as dist

        node = ray.get_runtime_context().get_node_id()
        self.steps += 1
        if self.steps == 6:
            if dist.get_rank() == 1 and not self.file.exists():
                self.file.write_text(node)
            if self.file.exists() and self.file.read_text() == node:
                raise torch.AcceleratorError(FAULT)
        time.sleep(0.02)
        return self.inner(batch)


def train(folder: Path, name: str, **changes: Any) -> tuple[Any, list[dict[str, Any]], str, str]:
    """Result, records, what was shown, and the node that failed."""
    text, file = io.StringIO(), folder / f"{name}.node"
    config = parse_config(
        raw_config(folder, name=name, data__read={"reader": "local"}, trainer__cpus_per_worker=1, **changes)
    )
    display = Display(Console(file=text, width=300))
    trainer = Trainer(config, factory=lambda **given: Faulty(DLRM(**given), file), display=display)
    result = trainer.fit()
    return result, list(trainer.folder.read_metrics()), text.getvalue(), file.read_text()


def program(folder: Path) -> None:
    """A run with room to spare; then, with a node less, an elastic one that shrinks, and one that needs every node."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        result, records, shown, failed = train(folder, "spare", trainer__num_workers=2)
        assert result.recoveries == 1, shown
        (event,) = [record for record in records if record.get("event") == "failed_node"]
        assert event["node"] == failed and FAULT in event["message"], event
        assert "failed (worker 1: AcceleratorError" in shown and "used again" not in shown, shown

        cluster.remove_node(nodes.pop())
        until = time.monotonic() + 120
        while ray.cluster_resources()["CPU"] > 2:
            assert time.monotonic() < until, ray.nodes()
            time.sleep(0.1)
        result, _, shown, _ = train(folder, "elastic", trainer__num_workers=[1, 2], trainer__epochs=4)
        assert result.recoveries == 1 and result.world_size == 1, shown
        assert "there is room for more workers" not in shown, shown

        try:
            _, _, shown, _ = train(
                folder, "every", trainer__num_workers=2, trainer__max_failures=1, trainer__checkpoint_every=None
            )
        except ValueError as error:
            assert "failed 2 times without a new checkpoint" in str(error) and FAULT in str(error), error
        else:
            raise AssertionError(f"the run needs the node that always fails: {shown}")
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("ended as expected")


@pytest.mark.long
def test_workers_restart_without_the_node(tmp_path: Path) -> None:
    write_all(tmp_path)
    with tempfile.TemporaryDirectory(prefix="rr", dir="/tmp") as temporary:  # Ray's socket paths must be short
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        script = tmp_path / "program.py"
        script.write_text(f"import pathlib\nfrom {__name__} import program\nprogram(pathlib.{tmp_path!r})\n")
        env |= {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0"}
        done = run_forked(script, ROOT, env | {"PYTHONWARNINGS": "ignore"}, timeout_s=300)
    assert done.returncode == 0 and "ended as expected" in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]
