"""Every code cell of the tutorials runs with the package's name swapped, in a process of its own, and prints what the
tutorials show. Skipped where the tutorials are not at hand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.seeds import cells

ROOT = Path(__file__).resolve().parents[2]
FOLDER = cells.folder()
# what a sharded module is made of, and the source of its forward, are each library's own
OWN = ("def forward", "ShardedEmbeddingBagCollection", "PooledEmbedding", "UserWarning")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="the tutorials' files are not here; RAYREC_SEEDS names a folder")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def tutorial(number: str) -> Path:
    assert FOLDER is not None
    (path,) = FOLDER.glob(f"{number}_*.txt")
    return path


def run(script: Path) -> str:
    """What the script prints in a process that is forked, as `python SCRIPT` would."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{script.parent}", "OMP_NUM_THREADS": "1"}
    done = run_forked(script, script.parent, env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def run_alone(script: Path) -> str:
    """What the script, which starts processes, prints in an interpreter of its own."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{script.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=script.parent, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def in_order(text: str, parts: list[str]) -> None:
    """Asserts that every part is there, each after the one before."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"not printed, or not in this place: {part!r}\n{text}"
        at = found + len(part)


def shown(path: Path) -> list[str]:
    """The printed blocks of a page, as its author saw them, with the package's name and the device swapped."""
    blocks = re.findall(r"^ \.\. code-block:: none\n((?:\n|    .*\n)+)", path.read_text(), flags=re.MULTILINE)
    texts = [re.sub(r"^ {4}", "", block, flags=re.MULTILINE).strip("\n") for block in blocks]
    return [text.replace("torchrec", "rayrec") for text in texts]


def settled(text: str) -> list[str]:
    """The lines of an output that are the same in every run: no random numbers, addresses, paths or warnings."""
    loose = ("0x", "[[", "  [", "[0.", "Loss:", "-packages", "WARNING", "placement", "rank:", "-----", "grad_fn")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if not any(mark in line for mark in loose)]
    return [line for line in lines if line]


def test_the_introduction(tmp_path: Path) -> None:
    path = tutorial("000")
    code = cells.from_page(path, free_port())
    assert len(code) >= 15
    script = tmp_path / "introduction.py"
    script.write_text("\n".join(code))
    printed = run(script)
    blocks = shown(path)
    page = "\n".join(blocks)
    ours = settled(printed)
    wanted = [line for block in blocks if not any(mark in block for mark in OWN) for line in settled(block)]
    assert len(wanted) > 40
    assert [line for line in wanted if line not in ours] == []
    in_order(printed, ["JaggedTensor({\n    [[5], [7, 1]]\n})\n", '"user": [[2, 3], [4, 1]]\n})\n'])
    losses = [float(loss) for loss in re.findall(r"Iteration Loss: (\S+)", printed)]
    theirs = [float(loss) for loss in re.findall(r"Iteration Loss: (\S+)", page)]
    assert losses[0] == pytest.approx(theirs[0], abs=2)  # 256 less the sum of small random weights
    assert losses[0] - losses[1] == pytest.approx(theirs[0] - theirs[1], abs=0.02)


def test_the_notebook_on_sharding(tmp_path: Path) -> None:
    code = cells.from_notebook(tutorial("001"), free_port())
    calls = [cell for cell in code if cell.lstrip().startswith("spmd")]
    assert len(calls) == 2
    (tmp_path / "notebook.py").write_text("\n".join(cell for cell in code if cell not in calls))
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing\n\nimport notebook\n\n"
        "multiprocessing.set_forkserver_preload(['notebook'])  # imported once for all ranks\n"
        "if __name__ == '__main__':\n" + "".join(f"    exec({call!r}, vars(notebook))\n" for call in calls)
    )
    printed = run_alone(script)
    assert printed.count("sharding plan:") == 4  # two ranks, two ways to shard
    rows = [re.split(r"\s*\|\s*", line.strip()) for line in printed.splitlines()]
    for large_or_small in ("large_table_", "small_table_"):
        placed = {
            row[3] for row in rows if row[0].startswith(large_or_small) and row[1] == "table_wise" and row[2] == "fused"
        }
        assert placed == {"[0]", "[1]"}  # each rank has one table of each size
        cut = [row for row in rows if row[0].startswith(large_or_small) and row[1] == "row_wise"]
        assert len(cut) == 4 and all(row[3] == "[0, 1]" for row in cut)
    in_order(printed, ["[0, 0]", "[4096, 64]"])
    assert ["large_table_0", "[2048, 0]", "[2048, 64]", "rank:1/cpu"] in rows
    assert ["small_table_0", "[512, 0]", "[512, 64]", "rank:1/cpu"] in rows


def test_the_older_introduction(tmp_path: Path) -> None:
    code = cells.from_markdown(tutorial("002"), free_port())
    assert len(code) == 6
    script = tmp_path / "older.py"
    script.write_text("\n".join(code))
    in_order(
        run(script),
        [
            "DistributedModelParallel(",
            "product_table | table_wise    | fused          | [0]",
            'KeyedJaggedTensor({\n    "product": [[101, 202], [], [303]],\n    "user": [[404], [505], [606]]\n})\n',
            "rayrec.distributed.collections.embedding_bag.EmbeddingBagCollectionAwaitable object",
        ],
    )
