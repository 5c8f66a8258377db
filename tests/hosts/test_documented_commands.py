"""The guide's commands for a cluster, word for word, in the home of a user who ran Ray locally before."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.hosts.lab import Host, laboratory
from tests.hosts.ray_hosts import SETTINGS
from tests.train.small import raw_config, write_all

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]
ROOT = Path(__file__).resolve().parents[2]
LOCAL_RUN = 'import ray; ray.init(address="local", num_cpus=1, include_dashboard=False); ray.shutdown()'
WITHOUT_TOKEN = """
mkdir -p "$HOME/stranger"
for mode in token disabled; do
    if HOME="$HOME/stranger" RAY_AUTH_MODE=$mode ray job submit --address http://127.0.0.1:8265 -- echo let-in; then
        echo "a stranger was let in under RAY_AUTH_MODE=$mode"; exit 1
    fi
done
echo strangers refused
"""


def cluster_commands(readme: Path, heading: str) -> str:
    """The first shell block below a heading."""
    found = re.search(rf"^## {heading}\n.*?```bash\n(.*?)```", readme.read_text(), re.DOTALL | re.MULTILINE)
    assert found, heading
    return found.group(1)


def for_small_run(folder: Path) -> dict[str, str]:
    """What changes in the guide's commands so that they train the config of a folder with two workers."""
    return {
        "data/movielens/train.yaml": str(folder / "train.yaml"),
        "trainer.num_workers=8": "trainer.num_workers=2",
        "/shared/runs": str(folder / "runs"),
    }


def changed(words: str, changes: dict[str, str]) -> str:
    for there, here in changes.items():
        assert there in words
        words = words.replace(there, here)
    return words


def test_the_guides_commands_on_two_hosts_one_of_which_is_lost(tmp_path: Path) -> None:
    """In a home where a local Ray ran before, `ray start` on both as the guide has it, a worker on each; the run ends
    on the host that remains. Who has no token is let in by neither mode."""
    write_all(tmp_path)
    spread = {"placement_strategy": "SPREAD"}  # two workers would fit on one host
    raw = raw_config(tmp_path, trainer__cpus_per_worker=0.5, trainer__epochs=20, trainer__resources=spread)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(raw))
    words = cluster_commands(ROOT / "deploy/README.md", "Machines without Kubernetes")
    words = changed(words, for_small_run(tmp_path))
    shell, token, head, job = re.split(r"\n(?=ray )", words)
    others = re.search(r"# on one machine; on the others: (ray start .*)", head)
    assert others and "in every shell and on every machine" in shell and "copy it to the other machines" in token
    run = tmp_path / "runs" / "small"

    with laboratory(2) as lab:
        first, second = lab.hosts
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYREC_"))}
        home = str(lab.folder / "tmp")  # each host has its own there
        environment |= SETTINGS | {"HOME": home, "RAY_TMPDIR": home, "TMPDIR": home}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

        def on(host: Host, script: str) -> subprocess.Popen[bytes]:
            return lab.start(
                host, ["bash", "-euo", "pipefail", "-c", f"cd {ROOT}\n{script}"], environment, f"{host.name}.log"
            )

        def wait(what: str, condition: Callable[[], bool], timeout_s: float = 300) -> None:
            until = time.monotonic() + timeout_s
            while not condition():
                alive = submitting.poll() is None and time.monotonic() < until
                assert alive, f"waiting for {what}: {lab.logs(20_000)}"
                time.sleep(0.1)

        for host in lab.hosts:
            host.has_default_route()
        started, joined = lab.folder / "started", lab.folder / "joined"
        until_joined = f"touch {started}; until test -e {joined}; do sleep 0.2; done"
        before = f"{sys.executable} -c '{LOCAL_RUN}'\ntest -s ~/.ray/auth_token"
        submitting = on(first, "\n".join([before, shell, token, head, until_joined, job, WITHOUT_TOKEN]))
        wait("ray start --head", started.exists)
        (lab.folder / second.name / ".ray").mkdir()
        shutil.copy(lab.folder / first.name / ".ray/auth_token", lab.folder / second.name / ".ray/auth_token")
        joins = others[1].replace("HEAD", first.address)
        other = on(second, f"{shell}\n{joins}\ntouch {joined}; exec sleep infinity")
        wait("a checkpoint", lambda: any((run / "checkpoints").glob("*/manifest.json")))
        plan = json.loads((run / "plan.json").read_text())
        assert {host["name"] for host in plan["planned_for"]["hosts"]} == {first.address, second.address}
        other.kill()
        try:
            submitting.wait(500)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job does not end\n{lab.logs(20_000)}")
        assert submitting.returncode == 0, lab.logs(20_000)
        told = (lab.folder / f"{first.name}.log").read_text()
        assert "succeeded" in told and "strangers refused" in told and "let-in" not in told, told
    result = json.loads((run / "result.json").read_text())
    assert (result["recoveries"], result["world_size"], result["epochs"]) == (1, 2, 20)
    assert result["train"]["samples"] == 20_000
    plan = json.loads((run / "plan.json").read_text())
    assert [host["name"] for host in plan["planned_for"]["hosts"]] == [first.address]
