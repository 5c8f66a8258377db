"""`python -m rayrec.torchrec` and `install()`: scripts and libraries that import torchrec run on rayrec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
import torchrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def lengths(kjt):
    assert isinstance(kjt, KeyedJaggedTensor) and isinstance(kjt, torchrec.KeyedJaggedTensor)
    return kjt.lengths().tolist()
"""
SCRIPT = """
import importlib.util
import sys

import torch
import torch.multiprocessing
import torchrec
import torchrec.distributed.planner.types
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import library


def work(rank, values):
    assert __name__ == "__mp_main__"
    ids = torch.tensor(values)
    print("rank", rank, library.lengths(torchrec.KeyedJaggedTensor(["f"], ids, lengths=ids)), sys.argv[1:], flush=True)


if __name__ == "__main__":
    import rayrec
    import rayrec.torchrec.sparse.jagged_tensor as ours

    assert torchrec is rayrec.torchrec and torchrec.__name__ == "rayrec.torchrec"
    assert torchrec.sparse.jagged_tensor is ours and sys.modules["torchrec.sparse.jagged_tensor"] is ours
    assert torchrec.sparse.jagged_tensor.KeyedJaggedTensor is ours.KeyedJaggedTensor is rayrec.KeyedJaggedTensor
    assert EmbeddingBagConfig is rayrec.EmbeddingBagConfig
    assert importlib.util.find_spec("torchrec").name == torchrec.__spec__.name == "rayrec.torchrec"
    assert sys.modules["__main__"].work is work
    print("script", sys.argv, __file__)
    torch.multiprocessing.spawn(work, args=([2, 1, 0],), nprocs=1)
    sys.exit(3)
"""


def run(*command: str, path: tuple[Path, ...] = (), cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    return subprocess.run([sys.executable, *command], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_its_library_and_its_spawned_process_import_rayrec(tmp_path: Path) -> None:
    script = write(tmp_path / "job", "train.py", SCRIPT)
    write(tmp_path / "job", "library.py", LIBRARY)
    done = run("-m", "rayrec.torchrec", str(script), "--steps", "5", cwd=tmp_path)
    assert done.returncode == 3, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        f"script ['{script}', '--steps', '5'] {script}",
        "rank 0 [2, 1, 0] ['--steps', '5']",
    ]


def test_an_installed_torchrec_is_named_once_and_not_used(tmp_path: Path) -> None:
    other = write(tmp_path / "site", "torchrec/__init__.py", "raise RuntimeError('imported')").parent
    script = write(tmp_path, "train.py", "import torchrec, torchrec.streamable\nprint(torchrec.__name__)\n")
    done = run("-m", "rayrec.torchrec", str(script), path=(other.parent,))
    assert (done.returncode, done.stdout) == (0, "rayrec.torchrec\n"), done.stderr
    assert done.stderr == f"`import torchrec` means rayrec.torchrec; TorchRec in {other} is not used\n"


def test_a_traceback_ends_in_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import torchrec\n\n\ndef step():\n    raise KeyError('loss')\n\n\nstep()\n")
    done = run("-m", "rayrec.torchrec", str(script))
    assert done.returncode == 1
    assert f'  File "{script}", line 8, in <module>\n    step()\n' in done.stderr
    assert f"  File \"{script}\", line 5, in step\n    raise KeyError('loss')\n" in done.stderr


def test_a_module_that_is_not_offered_says_what_to_use_and_one_that_there_is_not_is_named(tmp_path: Path) -> None:
    text = "try:\n    import torchrec.sparse.nothing\nfinally:\n    import torchrec.modules.embedding_tower\n"
    done = run("-m", "rayrec.torchrec", str(write(tmp_path, "train.py", text)))
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'torchrec.sparse.nothing'" in done.stderr
    not_offered = "rayrec.torchrec.not_offered.NotOffered: there is no rayrec.torchrec.modules.embedding_tower: "
    assert not_offered in done.stderr


def test_installing_after_another_torchrec_was_imported_is_refused(tmp_path: Path) -> None:
    other = write(tmp_path, "torchrec/__init__.py", "")
    done = run("-c", "import torchrec, rayrec.torchrec; rayrec.torchrec.install()", path=(tmp_path,))
    assert f"ImportError: torchrec is already imported from {other}; call rayrec.torchrec.install() bef" in done.stderr


def test_installing_twice_is_installing_once() -> None:
    code = "import sys, rayrec.torchrec as t; before = len(sys.meta_path); t.install(); t.install(); import torchrec\n"
    done = run("-c", f"{code}print(len(sys.meta_path) - before, torchrec is t)")
    assert done.stdout == "1 True\n", done.stderr


def test_without_a_script_usage_is_printed() -> None:
    for arguments, code in (((), 2), (("--help",), 0)):
        done = run("-m", "rayrec.torchrec", *arguments)
        assert done.returncode == code and "usage: python -m rayrec.torchrec SCRIPT" in done.stdout + done.stderr
    done = run("-m", "rayrec.torchrec", "no_such_file.py")
    assert done.returncode == 2 and "can't open 'no_such_file.py': No such file or directory" in done.stderr
