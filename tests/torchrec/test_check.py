"""`python -m rayrec.torchrec --check`: what a program uses that is missing or different, by line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.torchrec.check import Missing, check, report, resolve
from rayrec.torchrec.differences import DIFFERENCES
from rayrec.torchrec.left_out import MODULES
from rayrec.torchrec.left_out_names import NAMES

HERE = Path(__file__).parent
PROGRAMS = sorted(path for path in (HERE / "programs").glob("*.py") if path.stem not in ("__init__", "every"))

PROGRAM = """import torchrec
import torchrec.distributed as trec_dist
from torchrec.distributed.comm_ops import alltoall_pooled
from torchrec.distributed.planner.utils import LuusJaakolaSearch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as Pipeline
from torchrec.modules.embedding_modules import EmbeddingBagCollection as EBC
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, _maybe_compute_lengths
from torchrec.distributed.fbgemm_qcomm_codec import CommType
def halves(kjt: KeyedJaggedTensor):
    return kjt.split([1, 1]), kjt.keys(), kjt.nothing()
class Model:
    def __init__(self):
        self.batch = torchrec.KeyedJaggedTensor.from_lengths_sync([], 1, 2)
    def forward(self):
        return self.batch.permute([0])
Pipeline[int, int](1, 2, 3, context_type=int)
EBC(tables=[], no_such_argument=1)
trec_dist.quant_state.WeightSpec
torchrec.schema.api
CommType.MX4
torchrec.distributed.DistributedModelParalell
from torch.utils.data import missing_but_not_ours
"""


def by_name(tmp_path: Path, text: str) -> dict[str, tuple[bool, tuple[int, ...], str]]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return {item.name: (item.missing, item.lines, item.text) for item in check(path).findings}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_that_runs_misses_nothing(path: Path) -> None:
    checked = check(path)
    assert len(PROGRAMS) == 11 and checked.num_names >= 7
    assert not [item for item in checked.findings if item.missing]
    assert any("EmbeddingBagCollection" in item.name or "EmbeddingCollection" in item.name or "Jagged" in item.name
               for item in checked.findings)  # fmt: skip


def test_what_is_left_out_is_listed_with_its_lines_and_the_fix(tmp_path: Path) -> None:
    found = by_name(tmp_path, PROGRAM)
    missing = {name: lines for name, (is_missing, lines, _) in found.items() if is_missing}
    assert missing == {
        "torchrec.distributed.comm_ops": (3,),
        "torchrec.distributed.planner.utils.LuusJaakolaSearch": (4,),
        "torchrec.sparse.jagged_tensor._maybe_compute_lengths": (7,),
        "torchrec.modules.embedding_modules.EmbeddingBagCollection(no_such_argument=…)": (17,),
        "torchrec.distributed.quant_state": (18,),
        "torchrec.schema": (19,),
        "torchrec.distributed.DistributedModelParalell": (21,),
    }
    assert found["torchrec.distributed.comm_ops"][2] == MODULES["distributed.comm_ops"]
    search = next(text for _, names, text in NAMES if "LuusJaakolaSearch" in names)
    assert found["torchrec.distributed.planner.utils.LuusJaakolaSearch"][2] == search
    assert "did you mean DistributedModelParallel?" in found["torchrec.distributed.DistributedModelParalell"][2]


def test_what_differs_is_found_through_classes_of_variables_and_arguments(tmp_path: Path) -> None:
    found = by_name(tmp_path, PROGRAM)
    differ = {name: lines for name, (is_missing, lines, _) in found.items() if not is_missing}
    assert differ["torchrec.sparse.jagged_tensor.KeyedJaggedTensor.split"] == (10,)
    assert differ["torchrec.KeyedJaggedTensor.permute"] == (15,)
    assert differ["torchrec.distributed.train_pipeline.TrainPipelineSparseDist(context_type=…)"] == (16,)
    assert differ["torchrec.distributed.fbgemm_qcomm_codec.CommType.MX4"] == (20,)
    assert not by_name(tmp_path, PROGRAM.replace("torchrec", "other"))


def test_a_program_with_its_imports_changed_already_is_read_too(tmp_path: Path) -> None:
    changed = PROGRAM.replace("import torchrec\n", "from rayrec import torchrec\n").replace(
        "from torchrec.", "from rayrec.torchrec."
    )
    changed = changed.replace("import torchrec.distributed", "import rayrec.torchrec.distributed")
    assert by_name(tmp_path, changed) == by_name(tmp_path, PROGRAM)
    text = "import rayrec.torchrec.quant\nrayrec.torchrec.quant.utils\nrayrec.schema\n"
    assert list(by_name(tmp_path, text)) == ["torchrec.quant.utils"]


def test_the_command_prints_the_list_and_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + "raise SystemExit('it ran')\n")
    broken = tmp_path / "broken.py"
    broken.write_text("import (\n")
    command = [sys.executable, "-m", "rayrec.torchrec", "--check"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, cwd=HERE.parents[1], timeout=120)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout == report(path, check(path)) + "\n"
    assert "  line 3: torchrec.distributed.comm_ops\n      write the model's own" in done.stdout
    path.write_text("import torchrec\n")
    both = [*command, str(path), str(broken)]
    done = subprocess.run(both, capture_output=True, text=True, cwd=HERE.parents[1], timeout=120)
    assert done.returncode == 2 and "0 missing, 0 differences" in done.stdout and "line 1" in done.stderr


@pytest.mark.parametrize("what", sorted({what for what, _ in DIFFERENCES}))
def test_a_difference_names_what_there_is(what: str) -> None:
    import inspect

    path, _, argument = what.removesuffix(")").partition("(")
    target = resolve(f"torchrec.{path}")
    assert not argument or argument in inspect.signature(target).parameters
    with pytest.raises(Missing):
        resolve(f"torchrec.{path}".rpartition(".")[0] + ".nothing")


def test_the_guide_lists_the_same_differences() -> None:
    guide = (HERE.parents[1] / "rayrec/torchrec/README.md").read_text(encoding="utf-8")
    table = guide.partition("## What differs, and why")[2].partition("## What is not offered")[0]
    rows = re.findall(r"^\| `.*?` \| (.*) \|$", table, flags=re.MULTILINE)
    assert set(rows) == {text for _, text in DIFFERENCES}
