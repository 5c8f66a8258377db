"""The library guide's example runs as it stands, in one process."""

from __future__ import annotations

import re
from pathlib import Path

from tests.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]


def test_the_library_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "rayrec/README.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "init_process_group" in block]
    joined = source.replace('"gloo")', f'"gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)')
    end = "\nassert vectors.values().shape == (2, 64)\ndist.destroy_process_group()\n"
    (tmp_path / "example.py").write_text(joined + end)
    done = run_forked(tmp_path / "example.py", tmp_path, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "module: " in done.stdout
