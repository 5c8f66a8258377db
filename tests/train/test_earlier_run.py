"""A run that was begun before run folders kept the given config apart from what the run resolved.

The archive holds its config, its checkpoint after one epoch and its data, in `/earlier`. Its schema has a text id and a
derived column, whose types only the run's `config.yaml` names. That file has options that were removed since.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import yaml

from rayrec.train import Trainer, evaluate_run, load_config
from tests.train.small import config_of, run_folder

INTERVALS = ("log_every", "checkpoint_every", "eval_every")
GOLDEN = Path(__file__).parent / "golden" / "run_without_given_config.tar.xz"


def test_a_run_without_a_given_config_is_resumed(tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "runs" / "shop"
    for file in (run / "config.yaml", tmp_path / "shop.yaml"):
        file.write_text(file.read_text(encoding="utf-8").replace("/earlier", str(tmp_path)), encoding="utf-8")
    _set_minutes(run / "config.yaml", 5.0)
    earlier = run_folder(run).read_given()
    assert earlier is not None and earlier["trainer"].keys() <= config_of().to_dict()["trainer"].keys()
    assert [earlier["trainer"][name] for name in INTERVALS] == [5, "5min", None]
    before = evaluate_run(run)
    config = load_config(tmp_path / "shop.yaml", ["trainer.epochs=2"])
    assert config.data_schema.column_types == {} and not (run / "given.yaml").exists()
    result = Trainer(config, root=tmp_path).fit()
    assert (before["step"], result.steps) == (6, 12)
    resolved, given = (yaml.safe_load((run / name).read_text()) for name in ("config.yaml", "given.yaml"))
    assert resolved["schema"]["column_types"] == {"amount": "number"} and given["schema"]["column_types"] == {}
    assert [[raw["trainer"][name] for name in INTERVALS] for raw in (resolved, given)] == [[5, "15min", None]] * 2


def _set_minutes(config: Path, minutes: float) -> None:
    raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert (raw["trainer"]["checkpoint_every"], raw["trainer"]["checkpoint_every_minutes"]) == (None, 15.0)
    raw["trainer"]["checkpoint_every_minutes"] = minutes
    config.write_text(yaml.safe_dump(raw), encoding="utf-8")
