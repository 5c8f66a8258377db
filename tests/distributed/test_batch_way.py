"""A batch's way through the engine, from the forward to the end of backward: few files, those that the guide lists."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MOST_FUNCTIONS = 29, 116  # 20 and 98 without compiled loops, what calls them, and exchanges in place
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")  # functions to Python 3.11 only


class Model(nn.Module):
    """Pooled vectors and a layer over them."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


def traced_step(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """(file, function) of every function of rayrec that a step of a mixed plan calls on this rank."""
    rows = {"whole": 40, "rows": 50, "cols": 30, "copied": 20}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=16, feature_names=[f"f_{name}"])
        for name, n in rows.items()
    ]
    tables[1].pooling = PoolingType.MEAN
    kinds = {"whole": (ShardingType.TABLE_WISE, [0]), "rows": (ShardingType.ROW_WISE, [0, 1])}
    kinds |= {"cols": (ShardingType.COLUMN_WISE, [0, 1]), "copied": (ShardingType.DATA_PARALLEL, [0, 1])}
    plan = {table.name: cut(table, *kinds[table.name]) for table in tables}
    dmp = DistributedModelParallel(
        Model(tables),
        ShardingEnv.from_process_group(group),
        torch.device("cpu"),
        ShardingPlan({"ebc": plan}),
        [EmbeddingBagCollectionSharder({"learning_rate": 0.1})],
    )
    found: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT / "rayrec")) and code.co_name not in COMPREHENSIONS:
            name = Path(code.co_filename).relative_to(ROOT / "rayrec").as_posix()
            found.add((name, f"{code.co_qualname}:{code.co_firstlineno}"))

    for step in range(3):
        kjt = draw_kjt(torch.Generator().manual_seed(group.rank() + 10 * step), tables, 8, 4)
        traced = step == 2  # the first steps fill caches
        if traced:
            sys.setprofile(note)
            threading.setprofile(note)
        try:
            dmp(kjt).sum().backward()
        finally:
            if traced:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(found)


def test_a_batch_takes_a_short_way_through_the_files_that_the_guide_lists() -> None:
    guide = (ROOT / "rayrec" / "distributed" / "README.md").read_text(encoding="utf-8")
    section = guide.split("## The way of a batch, file by file")[1].split("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"`([a-z_/]+\.py)`", table))
    for found in on_ranks(2, traced_step):
        assert {file for file, _ in found} == listed
        assert len(listed) <= MOST_FILES
        assert len(found) <= MOST_FUNCTIONS, "\n".join(map(str, found))


if __name__ == "__main__":
    for rank, found in enumerate(on_ranks(2, traced_step)):
        files = sorted({file for file, _ in found})
        print(f"rank {rank}: {len(files)} files, {len(found)} functions")
        for file in files:
            names = [f.split(":")[0] for g, f in found if g == file]
            print("  ", file, len(names), ", ".join(names))
