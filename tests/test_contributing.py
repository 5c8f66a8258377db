"""docs/CONTRIBUTING.md is true: its recipes, applied to a copy of the package, add what they say; its house stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import LEVELS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")

PROBE = """
if __name__ == "__main__":
    import sys

    import torch
    from torch import nn

    import rayrec

    assert rayrec.__file__.startswith(sys.argv[1]), rayrec.__file__

    # the metric
    from rayrec.metrics import LabelMetrics
    from rayrec.train.config.trainer import EarlyStoppingConfig
    from rayrec.train.config.metric_titles import TITLES
    metrics = LabelMetrics()
    metrics.update(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]))
    assert abs(metrics.compute()["mean_prediction"] - (0.5 + torch.sigmoid(torch.tensor(2.0)).item()) / 2) < 1e-6
    assert EarlyStoppingConfig(metric="mean_prediction").metric in TITLES

    # the model, the optimizer and the transform, in a config
    from rayrec.train import TrainConfig
    from rayrec.train.setup import build
    config = TrainConfig(
        name="probe", data={"train": "train", "eval": "eval"}, storage={"path": "runs"},
        schema={
            "label": {"column": "label"},
            "dense": [{"name": "age", "transforms": [{"kind": "square_root"}]}],
            "sparse": [{"name": "user", "column": "user", "kind": "id", "mapping": {"kind": "identity"}}],
        },
        tables=[{"name": "user", "rows": 10, "dim": 4, "features": ["user"]}],
        model={"name": "logistic", "args": {"bias": False}},
        optimizers={"dense": {"kind": "nadam"}},
        sharding={"constraints": {"user": {"sharding_types": ["reversed_row_wise"]}}},
    )
    from rayrec.models import MODELS, Batch
    from rayrec.modules import EmbeddingBagConfig
    from rayrec.sparse import KeyedJaggedTensor
    tables = [EmbeddingBagConfig(name="user", num_embeddings=10, embedding_dim=4, feature_names=["user"])]
    model = MODELS["logistic"](tables, 1, tables_device="cpu", **config.model.args)
    sparse = KeyedJaggedTensor(["user"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1]))
    loss, logits = model(Batch(torch.ones(2, 1), sparse, torch.tensor([0.0, 1.0])))
    assert logits.shape == (2,) and model.score.bias is None
    loss.backward()
    assert build.DENSE_OPTIMIZERS[config.optimizers.dense.kind] is torch.optim.NAdam
    state = torch.optim.NAdam([nn.Parameter(torch.ones(3))])
    state.param_groups[0]["params"][0].grad = torch.ones(3)
    state.step()
    (numbers,) = state.state.values()
    assert build.STATE_PER_ELEMENT["nadam"] == sum(value.numel() == 3 for value in numbers.values())
    from rayrec.data import DataError, Mapping
    mapping = Mapping.from_config(config, labels=False)
    assert mapping.to_batch([{"age": 9.0, "user": 1}, {"age": 0.0, "user": 1}]).dense.tolist() == [[3.0], [0.0]]
    try:
        mapping.to_batch([{"age": -1.0, "user": 1}])
    except DataError as error:
        assert "age" in str(error)
    else:
        raise AssertionError("a number without a square root passed")
    from rayrec.train.config.reference import config_reference
    assert all(name in config_reference() for name in ('logistic', 'square_root', 'reversed_row_wise'))

    # the sharding type: the plan is as said, and the sharded model computes what the whole one does
    import torch.multiprocessing as mp
    from rayrec.distributed import EmbeddingBagCollectionSharder
    from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, write_html
    from rayrec.modules import EmbeddingBagCollection
    from rank import check, ids_of
    whole = EmbeddingBagCollection(tables, device="cpu", seed=1)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        constraints={"user": ParameterConstraints(sharding_types=["reversed_row_wise"])},
    )
    sharders = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]
    plan = planner.plan(whole, sharders)
    ((sharding,),) = [list(each.values()) for each in plan.plan.values()]
    assert [(shard.rank, shard.rows.start) for shard in sharding.shards] == [(1, 0), (0, 5)]
    write_html(planner.result(whole, sharders), sys.argv[1] + "/plan.html")

    expected = [whole(ids_of(rank)).values().detach() for rank in (0, 1)]
    arguments = (plan, whole, sharders, expected, f"file://{sys.argv[1]}/store")
    mp.start_processes(check, arguments, nprocs=2, start_method="fork")
    print("all five are there")
"""

RANK = """
import torch
import torch.distributed as dist
from rayrec.distributed import DistributedModelParallel
from rayrec.sparse import KeyedJaggedTensor


def ids_of(rank):
    return KeyedJaggedTensor(["user"], torch.tensor([rank, 9, 4]), lengths=torch.tensor([2, 1]))


def check(rank, plan, whole, sharders, expected, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=sharders)
    torch.testing.assert_close(model(ids_of(rank)).wait().values(), expected[rank])
    dist.destroy_process_group()
"""


def recipes() -> list[tuple[str, list[str]]]:
    """(path, lines) of every change on the page, in its order."""
    blocks = re.findall(r"^```diff\n--- (\S+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [(path, body.splitlines()) for path, body in blocks]


def changed(text: str, lines: list[str]) -> str:
    """The text with a change applied; `…` stands for the rest of a line, which stays."""
    old = [line[1:] for line in lines if line[:1] in (" ", "-")]
    new = [line[1:] for line in lines if line[:1] in (" ", "+")]
    if not old:
        return "\n".join(new) + "\n"
    pattern = r"\n".join(re.escape(line).replace("…", "(.*)") for line in old)
    found = list(re.finditer(f"^{pattern}$", text, flags=re.MULTILINE))
    assert len(found) == 1, f"{len(found)} places for the change:\n" + "\n".join(lines)
    rests = iter(found[0].groups())
    filled = re.sub("…", lambda _: next(rests), "\n".join(new))
    return text[: found[0].start()] + filled + text[found[0].end() :]


def test_the_recipes_do_what_they_say(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "rayrec", tmp_path / "rayrec", ignore=shutil.ignore_patterns("*.md", "torchrec"))
    done = recipes()
    for name, lines in done:
        path = tmp_path / name
        path.write_text(changed(path.read_text() if path.exists() else "", lines))
    assert {"A metric", "A model", "A feature transform", "An optimizer", "A sharding type"} <= set(
        re.findall(r"^### (.*)$", PAGE, flags=re.MULTILINE)
    )
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "rank.py").write_text(RANK)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "probe.py", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0 and "all five are there" in run.stdout, run.stderr[-3000:]


def test_a_change_that_fits_nowhere_or_twice_is_an_error() -> None:
    assert changed("a = 1\nb = 2\n", [" a = …", "+c = 3"]) == "a = 1\nc = 3\nb = 2\n"
    assert changed("x = {1}\n", ["-x = {…", "+x = {0, …"]) == "x = {0, 1}\n"
    for text in ("b\n", "a\na\n"):
        with pytest.raises(AssertionError, match="places for the change"):
            changed(text, ["-a", "+c"])


def test_the_house_is_the_one_that_the_architecture_test_holds() -> None:
    drawing = PAGE.partition("## The house")[2].partition("```")[2].partition("```")[0]
    floors: dict[str, int] = {}
    for line in drawing.strip("\n").splitlines():
        number, names = re.match(r" *(-?\d+)  ((?:\S+ +){1,2})", line + " ").groups()  # type: ignore[union-attr]
        floors |= {name: int(number) for name in names.split() if name in LEVELS}
    assert floors == {name: level for name, level in LEVELS.items() if name != "torchrec"}


def test_the_commands_and_files_of_the_page_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", PAGE)) <= targets
    for name in re.findall(r"`((?:rayrec|tests|jobs)/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists(), name


def test_the_quick_tests_are_one_file_of_each_package() -> None:
    listed = re.search(
        r"^QUICK = \$\(addprefix tests/,((?:.*\\\n)*.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert listed is not None
    files = listed[1].replace("\\", "").split()
    assert [name for name in files if not (ROOT / "tests" / name).is_file()] == []
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.glob("test_*.py"))}
    assert folders - {"hosts", "dryrun", "seeds"} <= {name.partition("/")[0] for name in files}
