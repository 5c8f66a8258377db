"""Holds the package order and the few doors to foreign APIs, by reading the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# An import may only point to a package of a lower level.
LEVELS = {
    "_runtime": -1,
    "storage": 0,
    "sparse": 0,
    "dynamic_ids": 0,
    "optim": 1,
    "modules": 2,
    "models": 6,
    "quant": 4,
    "distributed": 5,
    "checkpoint": 6,
    "data": 7,
    "metrics": 7,
    "inference": 8,
    "train": 9,
    "serve": 9,
    "cli": 10,
    "torchrec": 11,
}

BENCHMARKS = "jobs/bench/"  # measure the code behind the doors, and may compare with other libraries
FBGEMM_DOORS = (
    "rayrec/sparse/",
    "rayrec/distributed/kernel/",
    "rayrec/quant/",
    "rayrec/torchrec/",
    "rayrec/_runtime/fbgemm_version.py",
    BENCHMARKS,
)
RAY_DOORS = (
    "rayrec/storage/parallel.py",
    "rayrec/data/",
    "rayrec/train/",
    "rayrec/inference/",
    "rayrec/serve/",
    "rayrec/_runtime/local_ray.py",
    "rayrec/_runtime/ray_internals.py",
    BENCHMARKS,
)
NUMBA_DOORS = (
    "rayrec/_runtime/numba_loops.py",
    "rayrec/_runtime/numba_prefetch.py",
    "rayrec/distributed/ids/count_loop.py",
    "rayrec/distributed/ids/split_loops.py",
    "rayrec/distributed/kernel/sort_loops.py",
    "rayrec/distributed/kernel/update_loops.py",
    "rayrec/distributed/vectors/column_loops.py",
    "rayrec/dynamic_ids/loops.py",
)
COLLECTIVE_DOORS = ("rayrec/distributed/comm/", BENCHMARKS)

COLLECTIVES = (
    r"torch\.distributed\.((all_|broadcast|barrier|monitored_barrier|gather|scatter|reduce|batch_).*|i?send|i?recv"
    r"|nn\..*|_functional_collectives.*)"
)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    """`rayrec.train` for both `rayrec/train/__init__.py` and `rayrec/train/report.py`."""
    return ".".join(path.relative_to(ROOT).parts[:-1])


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def imports(path: Path) -> Iterator[tuple[str, str, int]]:
    """(name bound here, what it stands for, line) of every import in the file, also those inside functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top, node.lineno
                yield "", alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package_of(path).split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}", node.lineno


@cache
def uses(path: Path) -> list[tuple[str, int]]:
    """Every dotted name that the file imports or spells out, its import aliases resolved, and its line."""
    bound = {name: target for name, target, _ in imports(path) if name}
    found = [(target, line) for _, target, line in imports(path)]
    for node in nodes_of(path):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            found.append((".".join([bound[inner.id], *reversed(parts)]), node.lineno))
    return found


def outside(doors: tuple[str, ...], forbidden: str, *folders: str) -> list[str]:
    """Uses of names that match `forbidden` in files that are not behind `doors`."""
    return [
        f"{relative(path)}:{line} uses {name}"
        for path in sources(*folders)
        if not relative(path).startswith(doors)
        for name, line in uses(path)
        if re.fullmatch(forbidden, name)
    ]


def test_imports_point_down_the_package_order() -> None:
    wrong = []
    for path in sources("rayrec"):
        own = path.relative_to(ROOT / "rayrec").parts[0]
        if own not in LEVELS:
            continue  # rayrec/__init__.py and other modules beside the packages
        for name, line in uses(path):
            parts = name.split(".")
            other = parts[1] if parts[0] == "rayrec" and len(parts) > 1 else own
            if other != own and other in LEVELS and LEVELS[other] >= LEVELS[own]:
                wrong.append(f"{relative(path)}:{line} imports {name}: {own} must not know {other}")
    assert not wrong, "\n".join(wrong)


def upward_imports(folder: str, order: list[str]) -> list[str]:
    """Imports inside a folder that do not point down the order of its packages and modules; those that `order` does not
    name come last, and so do names that the folder's `__init__` defines."""
    home = folder.replace("/", ".") + "."

    def level(child: str) -> int:
        return order.index(child) if child in order else len(order)

    wrong = []
    for path in sources(folder):
        own = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
        for name, line in uses(path):
            other = name.removeprefix(home).split(".")[0] if name.startswith(home) else own
            if level(other) > level(own):
                wrong.append(f"{relative(path)}:{line} imports {name}: {own} is below {other}")
    return wrong


def packages_in(folder: str) -> list[str]:
    return sorted(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))


def test_rooms_of_data_point_one_way() -> None:
    rooms = ["arrays", "formats", "mapping", "source", "order", "stream", "tools", "live"]
    assert sorted(rooms) == packages_in("rayrec/data")
    order = [*rooms]
    order.insert(order.index("stream"), "config")
    wrong = upward_imports("rayrec/data", order)
    assert not wrong, "\n".join(wrong)


def test_rooms_of_train_point_one_way() -> None:
    """Low to high: what a run trains, its folder and report, what each rank does, the driver, and what uses runs."""
    low = ["errors", "terminal", "tolerance"]
    rooms = ["config", "run", "report", "setup", "worker", "driver", "planning", "trainer", "after", "tune", "worth"]
    assert sorted([*rooms, *low]) == sorted([*packages_in("rayrec/train"), "trainer", *low])
    files = {path.stem for path in (ROOT / "rayrec/train").glob("*.py")} - {"__init__"}
    assert files == {*low, "trainer"}, "other files have a room"
    wrong = upward_imports("rayrec/train", [*low, *rooms])
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_planner_point_one_way() -> None:
    rooms = ["machine", "tables", "cost", "search", "report"]
    assert sorted(rooms) == packages_in("rayrec/distributed/planner")
    wrong = upward_imports("rayrec/distributed/planner", rooms)
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_engine_point_one_way() -> None:
    rooms = ["comm", "plan", "kernel", "ids", "vectors", "executors", "replicas", "collections", "planner"]
    files = ["data_parallel", "model_parallel", "dmp_collection", "pipeline"]
    assert sorted(rooms) == packages_in("rayrec/distributed")
    assert sorted(files) == sorted(p.stem for p in (ROOT / "rayrec/distributed").glob("*.py") if p.stem != "__init__")
    wrong = upward_imports("rayrec/distributed", [*rooms, *files])
    assert not wrong, "\n".join(wrong)


def import_graph(folder: str) -> dict[str, set[str]]:
    """For each module the modules that it imports, also inside functions and for types."""
    modules = {}
    for path in sources(folder):
        modules[package_of(path) if path.stem == "__init__" else f"{package_of(path)}.{path.stem}"] = path
    graph = {}
    for module, path in modules.items():
        names = {name for _, name, _ in imports(path) if name not in (folder, module)}
        found = (next((m for m in (name, name.rpartition(".")[0]) if m in modules), module) for name in names)
        graph[module] = set(found) - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, in order; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_there_is_no_import_circle() -> None:
    found = circle(import_graph("rayrec"))
    assert not found, "imports form a circle: " + " → ".join(found)


def test_every_package_has_a_level() -> None:
    packages = {path.parent.name for path in (ROOT / "rayrec").glob("*/__init__.py")}
    assert packages <= set(LEVELS), f"give {packages - set(LEVELS)} a place in LEVELS"


def test_fbgemm_has_few_doors() -> None:
    wrong = outside(FBGEMM_DOORS, r"(fbgemm_gpu|torch\.ops\.fbgemm)(\..*)?", "rayrec", "jobs", "data")
    assert not wrong, "\n".join(wrong)


def test_ray_has_few_doors() -> None:
    wrong = outside(RAY_DOORS, r"ray(\..*)?", "rayrec", "jobs", "data")
    assert not wrong, "\n".join(wrong)


def test_what_ray_does_not_promise_is_listed_in_one_place() -> None:
    listed = ast.get_docstring(nodes_of(ROOT / "rayrec/train/driver/__init__.py")[0]) or ""
    private = re.compile(r"ray\..*\b_(private|internal)\b.*")
    using = {path.name for path in sources("rayrec") for name, _ in uses(path) if private.fullmatch(name)}
    assert using and not [name for name in using if name not in listed], "say there why it is needed"


def test_numba_has_few_doors() -> None:
    wrong = outside(NUMBA_DOORS, r"(numba|llvmlite)(\..*)?", "rayrec", "jobs", "data")
    assert not wrong, "\n".join(wrong)


def test_collectives_have_one_door() -> None:
    wrong = outside(COLLECTIVE_DOORS, COLLECTIVES, "rayrec", "jobs", "data")
    assert not wrong, "\n".join(wrong)


def test_torchrec_is_not_used() -> None:
    written_for_torchrec = ("tests/torchrec/programs/", "tests/torchrec/scripts/")  # and run on rayrec.torchrec
    wrong = outside((BENCHMARKS, *written_for_torchrec), r"torchrec(\..*)?", "rayrec", "jobs", "data", "tests")
    assert not wrong, "\n".join(wrong)


def test_nothing_outside_rayrec_torchrec_imports_it() -> None:
    wrong = outside(("rayrec/torchrec/",), r"rayrec\.torchrec(\..*)?", "rayrec", "data")
    assert not wrong, "\n".join(wrong)


def test_library_does_not_import_jobs_or_tests() -> None:
    wrong = outside((), r"(jobs|tests)\..*", "rayrec")
    assert not wrong, "\n".join(wrong)


def test_every_file_says_what_lives_in_it() -> None:
    silent = [relative(path) for path in sources("rayrec", "jobs", "data") if not ast.get_docstring(nodes_of(path)[0])]
    assert not silent, f"module docstring missing: {silent}"


# Working state, and what users fill in step by step; all other dataclasses are facts.
MUTABLE = {
    "rayrec/modules/configs.py": {"BaseEmbeddingConfig", "EmbeddingBagConfig", "EmbeddingConfig"},
    "rayrec/torchrec/modules/embedding_configs.py": {"EmbeddingTableConfig"},
    "rayrec/torchrec/optim/warmup.py": {"WarmupStage"},
    "rayrec/torchrec/datasets/utils.py": {"Batch"},
    "rayrec/torchrec/metrics/metrics_config.py": {
        "BatchSizeStage",
        "MetricsConfig",
        "RecMetricDef",
        "RecTaskInfo",
        "SessionMetricDef",
        "ThroughputDef",
    },
    "rayrec/train/worker/guards.py": {"Guards"},
    "rayrec/train/run/log.py": {"RunState"},
    "rayrec/storage/errors.py": {"DataError"},
    "rayrec/data/source/footer_index.py": {"FooterIndex"},
    "rayrec/data/source/slices.py": {"_Stream"},
    "rayrec/data/mapping/problems.py": {"Problems"},
    "rayrec/data/tools/check.py": {"CheckReport", "FeatureReport", "NumberReport"},
    "rayrec/data/stream/batching.py": {"Skipped", "_Pool"},
    "rayrec/torchrec/distributed/fbgemm_qcomm_codec.py": {"QCommsConfig"},
    "rayrec/torchrec/distributed/embedding_types.py": {"ShardedEmbeddingTable"},
    "rayrec/torchrec/distributed/planner/parts.py": {"DeviceHardware", "Shard"},
    "rayrec/torchrec/distributed/train_pipeline/gradient_accumulation.py": {"GradientAccumulationConfig"},
    "rayrec/torchrec/distributed/train_pipeline/pipeline_context.py": {"TrainPipelineContext"},
    "rayrec/torchrec/distributed/train_pipeline/pipeline_stage.py": {"_Item"},
    "rayrec/distributed/planner/search/pack.py": {"Packing"},
    "rayrec/distributed/vectors/transport.py": {"GatherTrip", "MessageTrip"},
    "rayrec/distributed/comm/trace.py": {"span"},
}


def test_dataclasses_are_frozen() -> None:
    found: dict[str, set[str]] = {}
    for path in sources("rayrec"):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and any(_is_open(decorator) for decorator in node.decorator_list):
                found.setdefault(relative(path), set()).add(node.name)
    unlike = {path: names ^ MUTABLE.get(path, set()) for path, names in found.items()}
    assert not {path: names for path, names in unlike.items() if names}, "facts are frozen: see MUTABLE"
    assert set(MUTABLE) <= set(found)


def _is_open(decorator: ast.expr) -> bool:
    """Whether it makes a dataclass that can be changed."""
    call = decorator if isinstance(decorator, ast.Call) else None
    name = call.func if call else decorator
    if not (isinstance(name, ast.Name) and name.id == "dataclass"):
        return False
    options = {option.arg: option.value for option in call.keywords} if call else {}
    frozen = options.get("frozen")
    return not (isinstance(frozen, ast.Constant) and frozen.value is True)


def test_the_library_part_does_not_import_ray() -> None:
    modules = "rayrec, rayrec.distributed, rayrec.checkpoint, rayrec.metrics, rayrec.models"
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or f"one of {modules} imports ray"


def test_a_process_that_reads_rows_loads_no_torch() -> None:
    """Importing it takes longer than reading a small data set, and a read task may start a process anew."""
    code = "import sys, rayrec.data.stream.ray_reader; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or "rayrec.data.stream.ray_reader imports torch"


def test_what_ray_trains_controller_imports_of_ours_is_light() -> None:
    """It is a process of its own, whose imports every start and restart waits for."""
    modules = "rayrec.train.driver.failures, rayrec.train.driver.placement, rayrec.train.worker.start"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'pyarrow', 'pydantic'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or f"one of {modules} imports torch, pyarrow or pydantic"


def test_the_reader_sees_through_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "rayrec" / "train" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.distributed import barrier as b\n"
        "from ..cli import main\nfrom . import report\n"
        "def f():\n    import ray.data\n    dist.all_reduce(1)\n    torch.ops.fbgemm.x(1)\n"
    )
    names = {name for name, _ in uses(file)}
    assert {
        "torch.distributed.all_reduce",
        "torch.distributed.barrier",
        "rayrec.cli.main",
        "rayrec.train.report",
        "ray.data",
        "torch.ops.fbgemm.x",
    } <= names
    assert sum(bool(re.fullmatch(COLLECTIVES, name)) for name in names) == 2


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    "line",
    [
        "from pack.b.two import y",
        "from pack.b import two",
        "from ..b import two",
        "import pack.b.two",
        "def f():\n    from pack.b.two import y",
        "if TYPE_CHECKING:\n    from pack.b.two import y",
    ],
)
def test_circles_and_upward_imports_are_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    files = {"pack/__init__.py": "", "pack/a/__init__.py": "", "pack/b/__init__.py": ""}
    written(tmp_path, {**files, "pack/a/one.py": "x = 1", "pack/b/two.py": "from pack.a.one import x"})
    assert not circle(import_graph("pack")) and not upward_imports("pack", ["a", "b"])
    nodes_of.cache_clear()
    uses.cache_clear()
    written(tmp_path, {"pack/a/one.py": f"from typing import TYPE_CHECKING\n{line}\n"})
    assert set(circle(import_graph("pack"))) == {"pack.a.one", "pack.b.two"}
    assert [item.split()[0] for item in upward_imports("pack", ["a", "b"])][:1] in (
        ["pack/a/one.py:2"],
        ["pack/a/one.py:3"],
    )
