"""`lookups_by_rank`: where ids are looked up, in the lines of training and in the report; a warning if it is uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import write_report
from rayrec.train.worker.window import uneven_lookups
from tests.distributed.oracle import cut
from tests.ranks import on_ranks
from tests.train.small import Silent, fit_job, make_job, raw_config, write_all
from tests.train.test_report import train_line, write_run

RW, CW, TW, DP = (ShardingType(f"{kind}") for kind in ("row_wise", "column_wise", "table_wise", "data_parallel"))


def sent_ids(group: dist.ProcessGroup, kind: ShardingType) -> list[list[int]]:
    """Ids that this rank sent to each rank: in two steps and an evaluation, and in nothing after them."""
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])
    plan = {"t": cut(table, kind, [1] if kind is TW else [0, 1])}
    module = EmbeddingBagCollectionSharder().shard(
        EmbeddingBagCollection([table], device="meta"), plan, ShardingEnv.from_process_group(group), torch.device("cpu")
    )
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 1, 2, 9]), lengths=torch.tensor([1, 3]))
    for _ in range(2):
        module(features).wait().values().sum().backward()
    with torch.no_grad():
        module(features).wait().values()
    return [module.take_sent_ids(), module.take_sent_ids()]


@pytest.mark.parametrize(
    ("kind", "wanted"), [(RW, [6, 2]), (CW, [8, 8]), (TW, [0, 8]), (DP, [0, 0])], ids=lambda value: str(value)
)
def test_ids_are_counted_by_the_rank_that_looks_them_up(kind: ShardingType, wanted: list[int]) -> None:
    assert on_ranks(2, sent_ids, kind) == [[wanted, []]] * 2


def fit_and_record(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[dict[str, Any]]:
    told = Silent()
    fit_job(make_job(raw), group, told)
    return told.records


def test_a_run_records_them_and_warns_once_if_a_rank_has_more_than_the_others(tmp_path: Path) -> None:
    write_all(tmp_path, rows=8000)
    plan = {"constraints": {name: {"sharding_types": ["row_wise"]} for name in ("user", "item", "tag")}}
    raw = raw_config(tmp_path, sharding=plan, trainer__log_every=1000, trainer__batch_size=800)
    raw["tables"] = [table | {"rows": 2 * table["rows"]} for table in raw["tables"]]
    raw["schema"]["sparse"][1]["mapping"] = {"kind": "identity"}  # so the upper halves of the tables are not used
    first, second = on_ranks(2, fit_and_record, raw)
    train = [record for record in first if record["kind"] == "train"]
    assert len(train) == 2 and not [record for record in second if "lookups_by_rank" in record]
    for line in train:
        assert line["lookups_by_rank"][0] > 10_000 and line["lookups_by_rank"][1] == 0
    (warning,) = [record["message"] for record in first if record.get("event") == "uneven"]
    assert warning.startswith("rank 0 looks up 2.0 times as many ids as the mean rank")


def test_few_or_even_lookups_are_not_warned_of() -> None:
    assert uneven_lookups([15_000, 5_000]) is None
    assert uneven_lookups([16_000, 5_000]) is not None
    assert uneven_lookups([1, 100]) is None


def test_the_report_shows_the_newest(tmp_path: Path) -> None:
    lines = [train_line(1, lookups_by_rank=[5, 5]), train_line(2, lookups_by_rank=[30, 10]), train_line(3)]
    text = write_report(write_run(tmp_path / "run", lines)).read_text()
    assert "Lookups by rank" in text and "busiest rank: 1.50 × the mean" in text
    for wrong in (None, [], ["a"], 3):
        text = write_report(write_run(tmp_path / "run", [train_line(1, lookups_by_rank=wrong)])).read_text()
        assert "Lookups by rank" not in text
