"""The guide's commands for a cluster, word for word, in the home of a user who ran Ray locally before."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.hosts.apart import fresh_home, run_apart, skip_without_namespaces
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


def test_the_guides_commands_work_after_a_local_run(tmp_path: Path) -> None:
    skip_without_namespaces()
    write_all(tmp_path, rows=200)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(raw_config(tmp_path)))
    words = cluster_commands(ROOT / "deploy/README.md", "Machines without Kubernetes")
    for there, here in (
        ("data/movielens/train.yaml", str(tmp_path / "train.yaml")),
        ("trainer.num_workers=8", "trainer.num_workers=2"),
        ("/shared/runs", str(tmp_path / "runs")),
    ):
        assert there in words
        words = words.replace(there, here)
    with fresh_home() as environment:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        words = f"{sys.executable} -c '{LOCAL_RUN}'\ntest -s ~/.ray/auth_token\n{words}"
        done = run_apart(words + WITHOUT_TOKEN, environment, ROOT, timeout_s=900)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "succeeded" in text and "strangers refused" in text, text
    assert "let-in" not in done.stdout.replace("echo let-in", ""), text
    assert list((tmp_path / "runs").glob("*/result.json"))
