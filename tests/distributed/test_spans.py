"""Spans of a step: who listens hears them, in order, and a profile shows them."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed import ProcessGroup

from rayrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv, ShardingType, comm
from rayrec.distributed.comm.trace import EXCHANGE, IDS, LOOKUP, ROUTE, VECTORS, listen, span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

Heard = list[tuple[str, float, float]]


def test_who_listens_hears_a_span_with_its_times() -> None:
    heard: Heard = []
    before = time.perf_counter()
    with listen(lambda *of: heard.append(of)), span("outer"), span("inner"):
        time.sleep(0.01)
    after = time.perf_counter()
    (inner, outer), names = heard, [name for name, _, _ in heard]
    assert names == ["inner", "outer"]
    assert before <= outer[1] <= inner[1] <= inner[2] - 0.01 < inner[2] <= outer[2] <= after


def test_nobody_hears_what_ends_after_they_left() -> None:
    heard: Heard = []
    with span("longer"), listen(lambda *of: heard.append(of)):
        pass
    assert heard == []


def test_a_span_that_fails_is_told_and_the_error_goes_on() -> None:
    heard: Heard = []
    with pytest.raises(KeyError), listen(lambda *of: heard.append(of)), span("fails"):
        raise KeyError
    assert [name for name, _, _ in heard] == ["fails"]


def test_a_profile_shows_them() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, span("lookup"):
        torch.ones(3).sum()
    (shown,) = [event for event in profile.events() if event.name == "rayrec lookup"]
    assert any(child.name == "aten::sum" for child in shown.cpu_children)


def test_a_step_of_two_ranks_has_its_stages_and_its_exchanges() -> None:
    for names in on_ranks(2, _step):
        assert [name for name in names if name != EXCHANGE] == [ROUTE, IDS, LOOKUP, VECTORS]
        assert names.index(EXCHANGE) < names.index(IDS)  # it ended within
        assert EXCHANGE in names[names.index(VECTORS) + 1 :]  # of backward


def _step(group: ProcessGroup) -> list[str]:
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    bags = EmbeddingBagCollection(tables=[table])
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    plan = {"t": cut(table, ShardingType.ROW_WISE, [0, 1])}
    sharded = sharder.shard(bags, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    kjt = KeyedJaggedTensor(["f"], torch.tensor([1, 7]), lengths=torch.tensor([1, 1]))
    comm.barrier(group)
    heard: Heard = []
    with listen(lambda *of: heard.append(of)):
        sharded(kjt).wait().values().sum().backward()
    return [name for name, _, _ in heard]
